"""Grouped matmul: consecutive rows of x times the matrix of their group, as MoE experts need it.

`grouped_matmul` is the entry point, `grouped_matmul_pair` that of two matmuls with the same rows; BACKENDS is the
capability table of both, fastest first (kernels/dispatch.py). M rows, E groups, D inputs, F outputs.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxhydra.kernels.dispatch import CallSpec, Capability, Operation, UnsupportedError
from maxhydra.kernels.grouped_matmul import few_rows as few_rows
from maxhydra.kernels.grouped_matmul import megablox, mosaic, reference, triton
from maxhydra.kernels.grouped_matmul.tiles import Pair
from maxhydra.kernels.placement import Placement
from maxhydra.kernels.tiles import Sizes, with_sizes

__all__ = ["BACKENDS", "OPERATION", "Backend", "Call", "UnsupportedError", "grouped_matmul", "grouped_matmul_pair"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(CallSpec):
    """Rows in groups, times one [inputs, outputs] matrix per group; all are local to the device."""

    rows: int
    groups: int
    inputs: int
    outputs: int

    @property
    def largest(self) -> int:
        """Elements of the largest array."""
        return max(self.rows * self.inputs, self.rows * self.outputs, self.groups * self.inputs * self.outputs)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backend(Capability[Call]):
    """Capabilities of one backend."""

    run: Callable[..., jax.Array]
    run_pair: Callable[..., Pair] | None = None
    """Two matmuls with the same rows, whose gradient is a single matmul; None: `run` for each."""
    multiple: int = 1
    """Inputs and outputs must be multiples of this."""
    padded_to: int = 1
    """Rows, inputs and outputs are padded with zeros to multiples of this, those of the tiles."""
    max_size: int | None = None
    """Elements of the largest array; None: any number."""

    def requirements(self, call: Call) -> tuple[tuple[bool, str], ...]:
        return (
            (
                call.inputs % self.multiple == call.outputs % self.multiple == 0,
                f"takes inputs and outputs in multiples of {self.multiple}, not {call.inputs} and {call.outputs}",
            ),
            (
                self.max_size is None or call.largest <= self.max_size,
                f"takes arrays of up to {self.max_size} elements, not {call.largest}",
            ),
        )

    def pad(self, *sizes: int) -> tuple[int, ...]:
        """The sizes, rounded up to multiples of `padded_to`."""
        return tuple(-(-size // self.padded_to) * self.padded_to for size in sizes)


def _ragged_dot(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """XLA's grouped matmul: a loop over tiles on a TPU; on a CPU one masked matmul over all groups."""
    return jax.lax.ragged_dot(x_MD, w_EDF, sizes_E.astype(jnp.int32))


# Inputs and outputs of the GPU kernels: padding smaller ones would multiply their size.
MULTIPLE = 16

# Fastest first.
BACKENDS: dict[str, Backend] = {
    "mosaic": Backend(
        run=mosaic.grouped_matmul,
        run_pair=mosaic.grouped_matmul_pair,
        platforms=("gpu",),
        capabilities=("9.0",),
        dtypes=("bfloat16",),
        multiple=MULTIPLE,
        padded_to=mosaic.MULTIPLE,
        max_size=2**31 - 1,
    ),
    "triton": Backend(
        run=triton.grouped_matmul,
        platforms=("gpu",),
        dtypes=("bfloat16", "float16"),
        multiple=MULTIPLE,
        padded_to=triton.MULTIPLE,
        max_size=2**31 - 1,
        tile_extents=lambda call: triton.tile_extents(*BACKENDS["triton"].pad(call.rows, call.inputs, call.outputs)),
    ),
    "megablox": Backend(
        run=megablox.grouped_matmul,
        platforms=("tpu",),
        dtypes=("float32", "bfloat16"),
        multiple=megablox.MULTIPLE,
        padded_to=megablox.MULTIPLE,
    ),
    "xla": Backend(run=_ragged_dot, slow_on=("gpu",)),
    "reference": Backend(run=reference.grouped_matmul, slow_on=("gpu",)),
}
OPERATION: Operation[Call, Backend] = Operation("grouped_matmul", BACKENDS)


@OPERATION.record_calls
def grouped_matmul(
    x_MD: jax.Array,
    w_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> jax.Array:
    """Return [M, F]: the first sizes[0] rows of x times w[0], the next sizes[1] rows times w[1], and so on.

    Over a mesh, each device makes this call with its local shards. sizes: requested tile sizes. place: None is the
    platform that JAX runs on. Rows after the last group, and their gradients, are unspecified.
    """
    call = _call(x_MD, w_EDF, sizes_E, sizes, place)
    row = OPERATION.select(backend, call)
    M, E, D, F = call.rows, call.groups, call.inputs, call.outputs
    rows, inputs, outputs = row.pad(M, D, F)
    x_MD, w_EDF = _padded(x_MD, rows, inputs), _padded(w_EDF, E, inputs, outputs)
    return with_sizes(row.run, sizes)(x_MD, w_EDF, sizes_E)[:M, :F]


@OPERATION.record_calls
def grouped_matmul_pair(
    x_MD: jax.Array,
    first_EDF: jax.Array,
    second_EDF: jax.Array,
    sizes_E: jax.Array,
    *,
    backend: str,
    sizes: Sizes = (),
    place: Placement | None = None,
) -> Pair:
    """`grouped_matmul` of the same rows with each of two matrices per group, as a gated MLP needs it."""
    call = _call(x_MD, first_EDF, sizes_E, sizes, place)
    if second_EDF.shape != first_EDF.shape or second_EDF.dtype != first_EDF.dtype:
        raise ValueError(f"the matrices differ: {first_EDF.dtype} {first_EDF.shape}, {second_EDF.shape}")
    row = OPERATION.select(backend, call)
    M, E, D, F = call.rows, call.groups, call.inputs, call.outputs
    rows, inputs, outputs = row.pad(M, D, F)
    x_MD = _padded(x_MD, rows, inputs)
    w = _padded(first_EDF, E, inputs, outputs), _padded(second_EDF, E, inputs, outputs)
    if row.run_pair is None:
        run = with_sizes(row.run, sizes)
        first_MF, second_MF = (run(x_MD, w_EDF, sizes_E) for w_EDF in w)
    else:
        first_MF, second_MF = with_sizes(row.run_pair, sizes)(x_MD, w, sizes_E)
    return first_MF[:M, :F], second_MF[:M, :F]


def _call(x_MD: jax.Array, w_EDF: jax.Array, sizes_E: jax.Array, sizes: Sizes, place: Placement | None) -> Call:
    (M, D), (E, inputs, F) = x_MD.shape, w_EDF.shape
    if inputs != D or sizes_E.shape != (E,) or x_MD.dtype != w_EDF.dtype:
        shapes = f"{x_MD.dtype} {x_MD.shape}, {w_EDF.dtype} {w_EDF.shape}, {sizes_E.shape}"
        raise ValueError(f"rows, matrices and group sizes have incompatible shapes or dtypes: {shapes}")
    place = place or Placement.here()
    return Call(
        platform=place.platform,
        capability=place.capability,
        dtype=x_MD.dtype.name,
        sizes=sizes,
        rows=M,
        groups=E,
        inputs=D,
        outputs=F,
    )


def _padded(x: jax.Array, *shape: int) -> jax.Array:
    """The array with zeros after the end of each dimension."""
    return x if x.shape == shape else jnp.pad(x, [(0, size - own) for own, size in zip(x.shape, shape, strict=True)])
