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
from maxhydra.kernels.grouped_matmul.mosaic.parts import ALIGN, TILE, WIDTH, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.tiles import edges, place, spans
from maxhydra.kernels.mosaic import ROWS, WORKERS


class Refs(NamedTuple):
    spans: Any
    """Of each group: first row and steps."""
    x_MK: Any
    edges: Any
    """First and last step of each group."""
    d_out_MN: Any


@partial(jax.jit, static_argnames="how")
def summed(how: How, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, K, N]: x^T times d_out over the rows of each group."""
    K, N, dtype = x_MK.shape[1], d_out_MN.shape[1], x_MK.dtype
    tile = how.tiles.summed.fitted(K // TILE, N)
    memory = Memory.of(tile, (WIDTH, ROWS), (WIDTH, tile.columns), dtype=dtype)
    out = jax.ShapeDtypeStruct((len(sizes_E), K, N), dtype)
    edges_XK = edges(x_MK, sizes_E, WIDTH, ALIGN)
    refs = Refs(jnp.stack(spans(sizes_E, WIDTH, ALIGN), axis=1), x_MK, edges_XK, d_out_MN)
    return launch(_Summed, how, tile, memory, out, refs)


class _Place(NamedTuple):
    group: Any
    first: Any
    """Row to begin with."""
    steps: Any
    row: Any
    """Of the matrix, as the column."""
    column: Any


@dataclasses.dataclass(frozen=True)
class _Summed(Program):
    name: ClassVar[str] = "grouped_matmul_summed"

    @property
    def sizes(self) -> tuple[int, int]:
        """A cluster's tiles of a matrix, down and across."""
        _, K, N = self.out_ref.shape
        return K // (self.tile.down * TILE), N // (self.tile.across * self.tile.columns)

    @property
    def count(self) -> Any:
        down, across = self.sizes
        return jnp.int32(self.out_ref.shape[0] * down * across)

    def place(self, number: Any) -> tuple[_Place, Any]:
        rows, columns = self.sizes
        group, number = jax.lax.div(number, jnp.int32(rows * columns)), jax.lax.rem(number, jnp.int32(rows * columns))
        row, column = place(number, rows, columns, max(1, self.tile.band // self.tile.down))
        first, steps = pl.multiple_of(self.refs.spans[group, 0], ALIGN), self.refs.spans[group, 1]
        down, across = self.at
        row, column = (row * self.tile.down + down) * TILE, (column * self.tile.across + across) * self.tile.columns
        return _Place(group, first, steps, row, column), steps

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        refs, row = self.refs, place.first + k * WIDTH
        is_first, is_last = k == 0, k == place.steps - 1

        def left(ref: Any, row: Any) -> None:
            for worker in range(WORKERS):
                own = ref.at[pl.ds(row, WIDTH), pl.ds(place.row + worker * ROWS, ROWS)]
                self.copy_left(own, worker, slot)

        edge = (2 * place.group + jnp.where(is_first, 0, 1)) * WIDTH
        pl.when(is_first | is_last)(lambda: left(refs.edges, edge))
        pl.when(~(is_first | is_last))(lambda: left(refs.x_MK, row))
        self.copy_right(refs.d_out_MN.at[pl.ds(row, WIDTH), pl.ds(place.column, self.tile.columns)], slot)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker].transpose((1, 0)), self.memory.right.at[slot])

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        out_ref = self.out_ref.at[place.group, pl.ds(place.row + worker * ROWS, ROWS)]
        self.write_block(sums, worker, out_ref, place.column)
