"""RMSNorm (Zhang and Sennrich, 2019) of the residual stream, which is passed through next to its norm.

`rms_norm` is the entry point; BACKENDS is its capability table, fastest first (kernels/dispatch.py). B batch, T tokens,
D features of a row, M rows.
"""

import dataclasses
import math
from typing import Any, Protocol

import jax

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.rms_norm import reference, triton
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "UnsupportedError", "rms_norm"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """The norm of a matrix [rows, dim]."""

    rows: int
    """On each device."""
    dim: int


class Run(Protocol):
    def __call__(
        self, x_MD: jax.Array, scale_D: jax.Array, *, eps: float, dtype: Any
    ) -> tuple[jax.Array, jax.Array]: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: Run
    row_multiple: int = 1
    dim_multiple: int = 1
    min_rows: int = 1
    max_dim: int | None = None

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
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
        splits=("batch", "length"),
        dtypes=("bfloat16", "float16"),
        row_multiple=triton.ROW_MULTIPLE,
        dim_multiple=triton.DIM_MULTIPLE,
        min_rows=triton.MIN_ROWS,
        max_dim=triton.MAX_DIM,
        tile_extents=lambda call: triton.tile_extents(call.rows),
    ),
    # XLA compiles the reference formula to good kernels.
    "xla": Backend(run=reference.rms_norm),
    "reference": Backend(run=reference.rms_norm),
}
OPERATION: Operation[Call, Backend] = Operation("rms_norm", BACKENDS)


@OPERATION.record_calls
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
    """Return x unchanged, and x / sqrt(mean(x^2) + eps) * scale, computed in float32 and cast to `dtype`.

    A caller that uses both takes both from here: the kernel then adds their gradients in its backward pass, instead of
    a separate pass over memory. sizes: requested tile sizes. place: None is one device of the platform that JAX runs
    on.
    """
    (B, T, D), names = x_BTD.shape, ("batch", "stream_length")
    place = (place or Placement.here()).dividing(batch=B, stream_length=T)
    call = Call(
        platform=place.platform,
        splits=place.splits(*names),
        dtype=x_BTD.dtype.name,
        rows=B * T // math.prod(map(place.num_shards, names)),
        dim=D,
        sizes=sizes,
    )
    row = OPERATION.select(backend, call)
    run = with_sizes(row.run, sizes)

    # The compiler would gather rows that are split over batch and tokens to merge them.
    is_partitioned = row.splits is None and bool(call.splits)

    def on_device(x_BTD: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, jax.Array]:
        if is_partitioned:
            return run(x_BTD, scale_D, eps=eps, dtype=dtype)
        residual_MD, normed_MD = run(x_BTD.reshape(-1, D), scale_D, eps=eps, dtype=dtype)
        return residual_MD.reshape(x_BTD.shape), normed_MD.reshape(x_BTD.shape)

    rows = place.spec(*names, None)
    return row.map_shards(on_device, place, in_specs=(rows, place.spec(None)), out_specs=(rows, rows))(x_BTD, scale_D)
