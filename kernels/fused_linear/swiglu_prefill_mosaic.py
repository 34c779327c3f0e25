"""The kernel of many_rows.py, in Pallas for Mosaic. M rows, K inputs, N outputs of gate and value together."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.fused_linear.epilogue import Activation
from maxhydra.kernels.grouped_matmul.mosaic.common import TILE, WIDTH, Program, launch
from maxhydra.kernels.grouped_matmul.mosaic.params import How
from maxhydra.kernels.mosaic import ROWS, WORKERS, memory


class Refs(NamedTuple):
    x_MK: Any
    w_NK: Any


class Memory(NamedTuple):
    left: Any
    right: Any
    """Gates, then values."""
    out: Any


class _Place(NamedTuple):
    """The first row of a tile, and its first output."""

    row: Any
    column: Any


@partial(jax.jit, static_argnames=("how", "activation"))
def gated(how: How, x_MK: jax.Array, weight_NK: jax.Array, activation: Activation) -> jax.Array:
    """`how.columns` are of a gate and a value each; `how.band` divides the tiles of rows."""
    dtype, out = x_MK.dtype, jax.ShapeDtypeStruct((x_MK.shape[0], weight_NK.shape[0] // 2), x_MK.dtype)
    room = Memory(
        left=memory(how.stages, WORKERS, ROWS, WIDTH, dtype=dtype),
        right=memory(how.stages, how.columns, WIDTH, dtype=dtype),
        out=memory(WORKERS, ROWS, how.columns // 2, dtype=dtype),
    )
    kind = partial(_Gated, gate=activation)
    return launch(kind, how, room, out, Refs(x_MK, weight_NK), name=_Gated.name, copies=WORKERS + 2)


@dataclasses.dataclass(frozen=True)
class _Gated(Program):
    name: ClassVar[str] = "gated_product"
    gate: Activation

    @property
    def width(self) -> int:
        """Outputs of a tile."""
        return self.how.columns // 2

    @property
    def count(self) -> Any:
        M, N = self.out_ref.shape
        return jnp.int32(M // TILE * (N // self.width))

    def place(self, number: Any) -> tuple[_Place, Any]:
        """The tiles of a band, column by column."""
        band, columns = jnp.int32(self.how.band), jnp.int32(self.out_ref.shape[1] // self.width)
        above, within = jax.lax.div(number, band * columns), jax.lax.rem(number, band * columns)
        row, column = above * band + jax.lax.rem(within, band), jax.lax.div(within, band)
        return _Place(row * TILE, column * self.width), jnp.int32(self.refs.x_MK.shape[1] // WIDTH)

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        some, here = pl.ds(k * WIDTH, WIDTH), self.barriers.here.at[slot]
        for worker in range(WORKERS):
            rows = self.refs.x_MK.at[pl.ds(place.row + worker * ROWS, ROWS), some]
            plgpu.copy_gmem_to_smem(rows, self.memory.left.at[slot, worker], here)
        for half in range(2):
            outputs = self.refs.w_NK.at[pl.ds(place.column + half * self.out_ref.shape[1], self.width), some]
            there = self.memory.right.at[slot, pl.ds(half * self.width, self.width)]
            plgpu.copy_gmem_to_smem(outputs, there, here)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot].transpose((1, 0)))

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        made = self.gate(sums[:, : self.width]) * sums[:, self.width :]
        rows, outputs = pl.ds(place.row + worker * ROWS, ROWS), pl.ds(place.column, self.width)
        self.write_block(made, worker, self.out_ref.at[rows, outputs])
