"""Compares a kernel with its reference: the same call on the same rounded inputs."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.dispatch import UnsupportedError
from maxhydra.measure.kernels import relative_error


@dataclasses.dataclass(frozen=True)
class Case:
    kernel: str
    dtype: str
    sizes: tuple[int, ...]
    options: tuple[tuple[str, Any], ...] = ()
    """Other properties of the call, by name."""

    @property
    def description(self) -> str:
        return " ".join([self.dtype, str(list(self.sizes)), *(f"{name}={value}" for name, value in self.options)])

    def sample(self, number: int, *shape: int, dtype: str | None = None) -> jax.Array:
        """Normally distributed values in the case's dtype."""
        return jax.random.normal(jax.random.key(number), shape).astype(dtype or self.dtype)


class Check(NamedTuple):
    """A call by each backend, and by the reference."""

    backends: dict[str, Callable[..., Any]]
    reference: Callable[..., Any]
    """Called with the arrays in float32."""
    arrays: tuple[Any, ...]
    """Floating-point inputs, with respect to which the call is differentiated."""
    has_gradients: bool = True


def single_backend(name: str, is_supported: bool, run: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The only backend of a kernel, if it supports the case."""
    return {name: run} if is_supported else {}


class Kernel(NamedTuple):
    cases: Callable[[], Iterator[Case]]
    check: Callable[[Case], Check]


class Result(NamedTuple):
    case: Case
    backend: str
    values: float | None = None
    gradients: float | None = None
    error: str | None = None

    def is_within(self, limit: float) -> bool:
        """False for NaN."""
        too_large = [x for x in (self.values, self.gradients) if x is not None and not x <= limit]
        return self.error is None and not too_large


def run_check(case: Case, check: Callable[[Case], Check]) -> list[Result]:
    """One result for each backend that serves the case; an exception is recorded, and other backends still run.

    float32 matmuls run at full precision in both, since GPUs use TF32 by default.
    """
    backends, reference, arrays, has_gradients = check(case)
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), arrays)
    weights = random_weights_like(jax.eval_shape(reference, *wide)) if has_gradients else None
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(values_and_gradients(reference, weights))(*wide)
    results = []
    for name, run in backends.items():
        try:
            with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
                actual = jax.jit(values_and_gradients(run, weights))(*arrays)
        except UnsupportedError:
            continue
        except Exception as error:
            results.append(Result(case, name, error=f"{type(error).__name__}: {str(error)[:300]}"))
            continue
        values, *gradients = (float(f"{relative_error(*pair):.2g}") for pair in zip(actual, expected, strict=True))
        results.append(Result(case, name, values, *gradients))
    return results


def random_weights_like(outputs: Any) -> Any:
    """Random weights for a sum of the outputs, exactly representable in all dtypes.

    Computed outside of the compiled call, because a compiler may drop a rounding.
    """
    leaves, shape = jax.tree.flatten(outputs)
    samples = [
        jax.random.normal(jax.random.key(99 + i), x.shape).astype(jnp.float8_e4m3fn) for i, x in enumerate(leaves)
    ]
    return jax.tree.unflatten(shape, [x.astype(jnp.float32) for x in samples])


def values_and_gradients(run: Callable[..., Any], weights: Any) -> Callable[..., tuple[Any, ...]]:
    """Values, and the gradients of their sum with these weights; None: only values."""

    def call(*arrays: Any) -> tuple[Any, ...]:
        if weights is None:
            return (run(*arrays),)
        out, pull_back = jax.vjp(run, *arrays)
        return out, pull_back(jax.tree.map(lambda weight, x: weight.astype(x.dtype), weights, out))

    return call
