"""The kernel of swiglu_prefill.py, in Pallas Mosaic GPU. M rows, K inputs, N outputs of gate and up together."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.fused_linear.epilogue import Activation
from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.grouped_matmul.mosaic.common import TILE, WIDTH, Program, launch
from maxhydra.kernels.mosaic import ROWS, WORKERS, shared_memory


class Refs(NamedTuple):
    x_MK: Any
    w_NK: Any


class Memory(NamedTuple):
    left: Any
    right: Any
    """Gate rows, then up rows."""
    out: Any


class _Position(NamedTuple):
    """First row and first output of a tile."""

    row: Any
    column: Any


@partial(jax.jit, static_argnames=("params", "activation"))
def swiglu_matmul(params: KernelParams, x_MK: jax.Array, weight_NK: jax.Array, activation: Activation) -> jax.Array:
    """`columns` counts gate and up outputs; `band` must divide the number of row tiles."""
    dtype, out = x_MK.dtype, jax.ShapeDtypeStruct((x_MK.shape[0], weight_NK.shape[0] // 2), x_MK.dtype)
    smem = Memory(
        left=shared_memory(params.stages, WORKERS, ROWS, WIDTH, dtype=dtype),
        right=shared_memory(params.stages, params.columns, WIDTH, dtype=dtype),
        out=shared_memory(WORKERS, ROWS, params.columns // 2, dtype=dtype),
    )
    kind = partial(_Gated, gate=activation)
    return launch(kind, params, smem, out, Refs(x_MK, weight_NK), name=_Gated.name, copies=WORKERS + 2)


@dataclasses.dataclass(frozen=True)
class _Gated(Program):
    name: ClassVar[str] = "swiglu_matmul"
    gate: Activation

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return self.params.columns // 2

    @property
    def count(self) -> Any:
        M, N = self.out_ref.shape
        return jnp.int32(M // TILE * (N // self.width))

    def position(self, number: Any) -> tuple[_Position, Any]:
        """The tiles of a band in column-major order."""
        band, columns = jnp.int32(self.params.band), jnp.int32(self.out_ref.shape[1] // self.width)
        above, within = jax.lax.div(number, band * columns), jax.lax.rem(number, band * columns)
        row, column = above * band + jax.lax.rem(within, band), jax.lax.div(within, band)
        return _Position(row * TILE, column * self.width), jnp.int32(self.refs.x_MK.shape[1] // WIDTH)

    def load(self, position: _Position, k: Any, slot: Any) -> None:
        inputs, ready = pl.ds(k * WIDTH, WIDTH), self.barriers.ready.at[slot]
        for worker in range(WORKERS):
            rows = self.refs.x_MK.at[pl.ds(position.row + worker * ROWS, ROWS), inputs]
            plgpu.copy_gmem_to_smem(rows, self.memory.left.at[slot, worker], ready)
        for half in range(2):
            outputs = self.refs.w_NK.at[pl.ds(position.column + half * self.out_ref.shape[1], self.width), inputs]
            destination = self.memory.right.at[slot, pl.ds(half * self.width, self.width)]
            plgpu.copy_gmem_to_smem(outputs, destination, ready)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot].transpose((1, 0)))

    def write(self, position: _Position, worker: Any, sums: jax.Array) -> None:
        gated_out = self.gate(sums[:, : self.width]) * sums[:, self.width :]
        rows, outputs = pl.ds(position.row + worker * ROWS, ROWS), pl.ds(position.column, self.width)
        self.write_block(gated_out, worker, self.out_ref.at[rows, outputs])
