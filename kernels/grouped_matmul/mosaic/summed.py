"""Sums over the rows of each group: the gradient of its matrix.

The first and the last tile of a group may hold rows of others. They are read from a copy in which those are zero.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.how import How
from maxhydra.kernels.grouped_matmul.mosaic.parts import ROWS, TILE, WIDTH, WORKERS, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.tiles import edges, place, spans


class Refs(NamedTuple):
    spans: Any
    """Of each group: first tile and how many."""
    x_MK: Any
    edges: Any
    """First and last tile of each group."""
    d_out_MN: Any


@partial(jax.jit, static_argnames="how")
def summed(how: How, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, K, N]: x^T times d_out over the rows of each group."""
    K, N, dtype, tile = x_MK.shape[1], d_out_MN.shape[1], x_MK.dtype, how.tiles.summed
    memory = Memory.of(tile, (WIDTH, ROWS), (WIDTH, tile.columns), dtype=dtype)
    out = jax.ShapeDtypeStruct((len(sizes_E), K, N), dtype)
    refs = Refs(spans(sizes_E, WIDTH), x_MK, edges(x_MK, sizes_E, WIDTH), d_out_MN)
    return launch(_Summed, how, tile, memory._replace(few=None), out, refs)


class _Place(NamedTuple):
    group: Any
    first: Any
    steps: Any
    row: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class _Summed(Program):
    name: ClassVar[str] = "grouped_matmul_summed"

    @property
    def sizes(self) -> tuple[int, int]:
        """Tiles of a matrix, down and across."""
        _, K, N = self.out_ref.shape
        return K // TILE, N // self.tile.columns

    @property
    def count(self) -> Any:
        down, across = self.sizes
        return jnp.int32(self.out_ref.shape[0] * down * across)

    def place(self, number: Any) -> tuple[_Place, Any]:
        down, across = self.sizes
        group, number = jax.lax.div(number, jnp.int32(down * across)), jax.lax.rem(number, jnp.int32(down * across))
        row, column = place(number, down, across, self.tile.band)
        first, steps = self.refs.spans[group, 0], self.refs.spans[group, 1]
        return _Place(group, first, steps, row * TILE, column * self.tile.columns), steps

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        refs, here = self.refs, self.barriers.here.at[slot]
        is_first, is_last = k == 0, k == place.steps - 1

        def left(ref: Any, block: Any) -> None:
            for worker in range(WORKERS):
                own = ref.at[pl.ds(block * WIDTH, WIDTH), pl.ds(place.row + worker * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(own, self.memory.left.at[slot, worker], here)

        pl.when(is_first | is_last)(lambda: left(refs.edges, 2 * place.group + jnp.where(is_first, 0, 1)))
        pl.when(~(is_first | is_last))(lambda: left(refs.x_MK, place.first + k))
        rows = pl.ds((place.first + k) * WIDTH, WIDTH)
        d_out = refs.d_out_MN.at[rows, pl.ds(place.column, self.tile.columns)]
        plgpu.copy_gmem_to_smem(d_out, self.memory.right.at[slot], here)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker].transpose((1, 0)), self.memory.right.at[slot])

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        out_ref = self.out_ref.at[place.group, pl.ds(place.row + worker * ROWS, ROWS)]
        self.write_block(sums, worker, out_ref, place.column)
