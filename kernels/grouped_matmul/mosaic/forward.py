"""Rows by the matrix of their group. A tile begins at its group's first row, or up to seven before it."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.common import ALIGN, TILE, WIDTH, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.mosaic.params import How
from maxhydra.kernels.grouped_matmul.tiles import schedule
from maxhydra.kernels.mosaic import ROWS, WORKERS


class Refs(NamedTuple):
    tiles: Any
    """Group, first row of the tile, first row of the group, its end, number among the columns."""
    used: Any
    """How many of them there are."""
    x_MK: Any
    w: Any
    """[E, K, N], or [E, N, K]."""


@partial(jax.jit, static_argnames=("how", "turned"))
def product(how: How, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, turned: bool) -> jax.Array:
    """x times w [E, K, N], or [E, N, K] if turned."""
    M, N = x_MK.shape[0], w.shape[1] if turned else w.shape[2]
    how = how.fitted(N)
    right = (how.columns, WIDTH) if turned else (WIDTH, how.columns)
    memory = Memory.of(how, (ROWS, WIDTH), right, dtype=x_MK.dtype)
    # Rows of no group are a group without steps.
    sizes_G = jnp.append(sizes_E, M - jnp.sum(sizes_E))
    tiles, used = schedule(sizes_G, M, rows=TILE, columns=N // how.columns, align=ALIGN, band=how.band)
    out = jax.ShapeDtypeStruct((M, N), x_MK.dtype)
    kind = _Turned if turned else _Product
    return launch(kind, how, memory, out, Refs(tiles, used, x_MK, w), name=kind.name, copies=WORKERS + 1)


class _Place(NamedTuple):
    group: Any
    row: Any
    """Of the tile, the first."""
    first: Any
    """Of the group."""
    end: Any
    column: Any
    """Of the tile, the first."""


@dataclasses.dataclass(frozen=True)
class _Product(Program):
    name: ClassVar[str] = "grouped_matmul"

    @property
    def count(self) -> Any:
        return self.refs.used[0]

    def place(self, number: Any) -> tuple[_Place, Any]:
        group, row, first, end, column = (self.refs.tiles[number, i] for i in range(5))
        steps = jnp.where(group < self.refs.w.shape[0], jnp.int32(self.refs.x_MK.shape[1] // WIDTH), 0)
        return _Place(group, pl.multiple_of(row, ALIGN), first, end, column * self.how.columns), steps

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        some, here = pl.ds(k * WIDTH, WIDTH), self.barriers.here.at[slot]
        for worker in range(WORKERS):
            rows = self.refs.x_MK.at[pl.ds(place.row + worker * ROWS, ROWS), some]
            plgpu.copy_gmem_to_smem(rows, self.memory.left.at[slot, worker], here)
        plgpu.copy_gmem_to_smem(self.right(place, some), self.memory.right.at[slot], here)

    def columns(self, place: _Place) -> Any:
        return pl.ds(place.column, self.how.columns)

    def right(self, place: _Place, some: Any) -> Any:
        return self.refs.w.at[place.group, some, self.columns(place)]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot])

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        """Rows of the group alone: another program has the others."""
        row = place.row + worker * ROWS
        first, end = jnp.maximum(place.first - row, 0), jnp.minimum(place.end - row, ROWS)

        @pl.when(end - first == ROWS)
        def _all() -> None:
            self.write_block(sums, worker, self.out_ref.at[pl.ds(row, ROWS), self.columns(place)])

        @pl.when((end - first > 0) & (end - first < ROWS))
        def _few() -> None:
            self.write_few(sums, worker, (row, first, end - first), place.column)

    def write_few(self, sums: jax.Array, worker: Any, rows: tuple[Any, Any, Any], column: Any) -> None:
        """Copies are of sizes that are known beforehand: one for each bit of the number of rows."""
        (row, first, count), few, short = rows, self.memory.few, sums.astype(self.out_ref.dtype)
        for c in range(0, self.how.columns, WIDTH):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            few[worker] = short[:, c : c + WIDTH]
            plgpu.commit_smem()
            for bit in range(ROWS.bit_length() - 1):
                size = 1 << bit
                start = first + (count & ~(2 * size - 1))
                own = few.at[worker, pl.ds(start, size)]
                there = self.out_ref.at[pl.ds(row + start, size), pl.ds(column + c, WIDTH)]
                pl.when(count & size != 0)(partial(plgpu.copy_smem_to_gmem, own, there))


@dataclasses.dataclass(frozen=True)
class _Turned(_Product):
    """With matrices [E, N, K]."""

    name: ClassVar[str] = "grouped_matmul_turned"

    def right(self, place: _Place, some: Any) -> Any:
        return self.refs.w.at[place.group, self.columns(place), some]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker], self.memory.right.at[slot].transpose((1, 0)))
