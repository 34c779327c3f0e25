"""RMSNorm (Zhang and Sennrich, 2019) of a stream that goes on beside it.

`rms_norm` is the one way in. BACKENDS says what serves what, fastest first: `auto` takes the first that serves the
call, and a backend that was asked for by name and cannot is an error. B batch, T tokens, D numbers of a row, M rows.
"""

import dataclasses
from typing import Any, Protocol

import jax

from maxhydra.kernels.call_recorder import watched
from maxhydra.kernels.capability import CallSpec, Capability
from maxhydra.kernels.dispatch import UnsupportedError, chosen
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import reference, triton
from maxhydra.kernels.tiles import Sizes, sized

__all__ = ["BACKENDS", "Backend", "Call", "UnsupportedError", "choose", "rms_norm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """A norm of so many rows of so many numbers."""

    rows: int
    dim: int


class Run(Protocol):
    def __call__(
        self, x_MD: jax.Array, scale_D: jax.Array, *, eps: float, dtype: Any
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """One row of the capability table."""

    run: Run
    row_multiple: int = 1
    dim_multiple: int = 1
    min_rows: int = 1
    max_dim: int | None = None

    def needs(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.rows >= self.min_rows and call.rows % self.row_multiple == 0,
                f"takes {self.min_rows} rows or more in multiples of {self.row_multiple}, not {call.rows}",
            ),
            (
                call.dim % self.dim_multiple == 0 and (self.max_dim is None or call.dim <= self.max_dim),
                f"takes rows in multiples of {self.dim_multiple} up to {self.max_dim} numbers, not {call.dim}",
            ),
        )


# Fastest first.
BACKENDS: dict[str, Backend] = {
    "triton": Backend(
        run=triton.rms_norm,
        platforms=("gpu",),
        devices=1,
        dtypes=("bfloat16", "float16"),
        row_multiple=triton.MULTIPLE,
        dim_multiple=triton.PIECE,
        min_rows=triton.FEWEST,
        max_dim=triton.LONGEST,
        cut=lambda call: triton.cut(call.rows),
    ),
    # XLA makes good kernels of the formula as it stands.
    "xla": Backend(run=reference.rms_norm),
    "reference": Backend(run=reference.rms_norm),
}


def choose(backend: str, call: Call) -> str:
    """The backend that serves the call: the one asked for, or under `auto` the fastest that can."""
    return chosen("rms_norm", backend, {name: row.refusals(call) for name, row in BACKENDS.items()})


@watched
def rms_norm(
    x_BTD: jax.Array,
    scale_D: jax.Array,
    *,
    eps: float,
    dtype: Any,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> tuple[jax.Array, jax.Array]:
    """x itself, and x / sqrt(mean(x^2) + eps) * scale in a format of its own, made in float32.

    Who goes on with both takes both from here: their gradients then meet in the kernel, and not in a pass of their own.
    sizes: asked of the kernel's tile. place: None is one device of the platform that JAX runs on.
    """
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
    place = place or Placement.here()
    (M, D), dtype_name = x_MD.shape, x_MD.dtype.name
    call = Call(platform=place.platform, devices=place.devices, dtype=dtype_name, rows=M, dim=D, sizes=sizes)
    run = sized(BACKENDS[choose(backend, call)].run, sizes)
    stream_MD, normed_MD = run(x_MD, scale_D, eps=eps, dtype=dtype)
    return stream_MD.reshape(x_BTD.shape), normed_MD.reshape(x_BTD.shape)
