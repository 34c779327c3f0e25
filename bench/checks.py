"""How a kernel is held against its reference: the same call, on the same rounded numbers, by both."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.measure.kernels import distance


@dataclasses.dataclass(frozen=True)
class Case:
    kernel: str
    dtype: str
    sizes: tuple[int, ...]
    asked: tuple[tuple[str, Any], ...] = ()
    """What else the call is about, by name."""

    @property
    def about(self) -> str:
        return " ".join([self.dtype, str(list(self.sizes)), *(f"{name}={value}" for name, value in self.asked)])

    def draw(self, number: int, *shape: int, dtype: str | None = None) -> jax.Array:
        """Normal numbers in the case's format."""
        return jax.random.normal(jax.random.key(number), shape).astype(dtype or self.dtype)


class Check(NamedTuple):
    """A call by each backend, and by the reference."""

    backends: dict[str, Callable[..., Any]]
    wanted: Callable[..., Any]
    """Is given the arrays in float32."""
    arrays: tuple[Any, ...]
    """Those in floats, by which it is differentiated."""
    has_gradients: bool = True


def only(name: str, is_able: bool, run: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The one backend there is, where it takes the case."""
    return {name: run} if is_able else {}


class Kernel(NamedTuple):
    cases: Callable[[], Iterator[Case]]
    check: Callable[[Case], Check]


class Found(NamedTuple):
    case: Case
    backend: str
    values: float | None = None
    gradients: float | None = None
    error: str | None = None

    def is_within(self, limit: float) -> bool:
        """What is no number is not."""
        far = [one for one in (self.values, self.gradients) if one is not None and not one <= limit]
        return self.error is None and not far


def checked(case: Case, check: Callable[[Case], Check]) -> list[Found]:
    """One for each backend that serves the case; what breaks is told, and others go on.

    In float32 both are asked for all bits of a product, which GPUs make in TF32 if nothing is said.
    """
    backends, reference, arrays, has_gradients = check(case)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    weights = drawn_like(jax.eval_shape(reference, *wide)) if has_gradients else None
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(both(reference, weights))(*wide)
    found = []
    for name, run in backends.items():
        try:
            with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
                ours = jax.jit(both(run, weights))(*arrays)
        except UnsupportedError:
            continue
        except Exception as error:
            found.append(Found(case, name, error=f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        values, *gradients = (float(f"{distance(*pair):.2g}") for pair in zip(ours, wanted, strict=True))
        found.append(Found(case, name, values, *gradients))
    return found


def drawn_like(outputs: Any) -> Any:
    """Weights of a sum of them, which all formats hold exactly. Not made where they are used: a compiler may leave a
    rounding out."""
    leaves, shape = jax.tree.flatten(outputs)
    drawn = [jax.random.normal(jax.random.key(99 + i), x.shape).astype(jnp.float8_e4m3fn) for i, x in enumerate(leaves)]
    return jax.tree.unflatten(shape, [x.astype(jnp.float32) for x in drawn])


def both(run: Callable[..., Any], weights: Any) -> Callable[..., tuple[Any, ...]]:
    """Values, and the gradients of their sum with these weights; None: values alone."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        if weights is None:
            return (run(*arrays),)
        out, pull = jax.vjp(run, *arrays)
        return out, pull(jax.tree.map(lambda weight, x: weight.astype(x.dtype), weights, out))

    return call
