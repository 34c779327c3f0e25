"""Rows by the matrix of their group. A tile that two groups share is made once for each of them."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.how import How
from maxhydra.kernels.grouped_matmul.mosaic.parts import ROWS, TILE, WIDTH, WORKERS, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.tiles import place, tile_table


class Refs(NamedTuple):
    tiles: Any
    """Group, number among the tiles of rows, first row, end."""
    used: Any
    """How many of them there are."""
    x_MK: Any
    w: Any
    """[E, K, N], or [E, N, K]."""


@partial(jax.jit, static_argnames=("how", "turned"))
def product(how: How, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, turned: bool) -> jax.Array:
    """x times w [E, K, N], or [E, N, K] if turned."""
    M, N, dtype = x_MK.shape[0], w.shape[1] if turned else w.shape[2], x_MK.dtype
    tile = how.tiles.turned if turned else how.tiles.product
    right = (tile.columns, WIDTH) if turned else (WIDTH, tile.columns)
    found = tile_table(sizes_E, M, TILE)
    used = jnp.sum(found[:, 2] < found[:, 3], dtype=jnp.int32)[None]
    memory = Memory.of(tile, (ROWS, WIDTH), right, dtype=dtype)
    out = jax.ShapeDtypeStruct((M, N), dtype)
    return launch(_Turned if turned else _Product, how, tile, memory, out, Refs(found, used, x_MK, w))


class _Place(NamedTuple):
    group: Any
    block: Any
    """First row of the tile."""
    first: Any
    """Row of the group."""
    end: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class _Product(Program):
    name: ClassVar[str] = "grouped_matmul"

    @property
    def across(self) -> int:
        return int(self.out_ref.shape[1]) // self.tile.columns

    @property
    def count(self) -> Any:
        return self.refs.used[0] * self.across

    def place(self, number: Any) -> tuple[_Place, Any]:
        refs: Refs = self.refs
        t, column = place(number, refs.used[0], self.across, self.tile.band)
        group, block, first, end = (refs.tiles[t, i] for i in range(4))
        steps = jnp.where(group < refs.w.shape[0], jnp.int32(refs.x_MK.shape[1] // WIDTH), 0)
        return _Place(group, block * TILE, first, end, column * self.tile.columns), steps

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        some, here = pl.ds(k * WIDTH, WIDTH), self.barriers.here.at[slot]
        for worker in range(WORKERS):
            rows = self.refs.x_MK.at[pl.ds(place.block + worker * ROWS, ROWS), some]
            plgpu.copy_gmem_to_smem(rows, self.memory.left.at[slot, worker], here)
        columns = pl.ds(place.column, self.tile.columns)
        plgpu.copy_gmem_to_smem(self.right(place.group, some, columns), self.memory.right.at[slot], here)

    def right(self, group: Any, some: Any, columns: Any) -> Any:
        return self.refs.w.at[group, some, columns]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot])

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        """Rows of the group alone: another program has the others."""
        block = place.block + worker * ROWS
        first, end = jnp.maximum(place.first - block, 0), jnp.minimum(place.end - block, ROWS)

        @pl.when(end - first == ROWS)
        def _all() -> None:
            self.write_block(sums, worker, self.out_ref.at[pl.ds(block, ROWS)], place.column)

        @pl.when((end - first > 0) & (end - first < ROWS))
        def _few() -> None:
            self.write_few(sums, worker, (block, first, end - first), place.column)

    def write_few(self, sums: jax.Array, worker: Any, rows: tuple[Any, Any, Any], column: Any) -> None:
        """Copies are of sizes that are known beforehand: one for each bit of the number of rows."""
        (block, first, count), few, short = rows, self.memory.few, sums.astype(self.out_ref.dtype)
        for c in range(0, self.tile.columns, WIDTH):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            few[worker] = short[:, c : c + WIDTH]
            plgpu.commit_smem()
            for bit in range(ROWS.bit_length() - 1):
                size = 1 << bit
                start = first + (count & ~(2 * size - 1))
                own = few.at[worker, pl.ds(start, size)]
                there = self.out_ref.at[pl.ds(block + start, size), pl.ds(column + c, WIDTH)]
                pl.when(count & size != 0)(partial(plgpu.copy_smem_to_gmem, own, there))


@dataclasses.dataclass(frozen=True)
class _Turned(_Product):
    """With matrices [E, N, K]."""

    name: ClassVar[str] = "grouped_matmul_turned"

    def right(self, group: Any, some: Any, columns: Any) -> Any:
        return self.refs.w.at[group, columns, some]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot].transpose((1, 0)))
