"""Sums over the rows of each group: the gradient of its matrix.

The first and the last step of a group may hold rows of others. They are read from a copy in which those are zero.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.common import ALIGN, TILE, WIDTH, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.mosaic.params import How
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
    how = how.fitted(N)
    memory = Memory.of(how, (WIDTH, ROWS), (WIDTH, how.columns), dtype=dtype)
    found = jnp.stack(spans(sizes_E, WIDTH, ALIGN), axis=1)
    refs = Refs(found, x_MK, edges(x_MK, sizes_E, WIDTH, ALIGN), d_out_MN)
    out = jax.ShapeDtypeStruct((len(sizes_E), K, N), dtype)
    return launch(_Summed, how, memory._replace(few=None), out, refs, name=_Summed.name, copies=WORKERS + 1)


class _Place(NamedTuple):
    group: Any
    first: Any
    """Row to begin with."""
    steps: Any
    down: Any
    """First row of the matrix."""
    columns: Any


@dataclasses.dataclass(frozen=True)
class _Summed(Program):
    name: ClassVar[str] = "grouped_matmul_summed"

    @property
    def sizes(self) -> tuple[int, int]:
        """Tiles of a matrix, down and across."""
        _, K, N = self.out_ref.shape
        return K // TILE, N // self.how.columns

    @property
    def count(self) -> Any:
        down, across = self.sizes
        return jnp.int32(self.out_ref.shape[0] * down * across)

    def place(self, number: Any) -> tuple[_Place, Any]:
        down, across = self.sizes
        group, number = jax.lax.div(number, jnp.int32(down * across)), jax.lax.rem(number, jnp.int32(down * across))
        row, column = place(number, down, across, self.how.band)
        first, steps = pl.multiple_of(self.refs.spans[group, 0], ALIGN), self.refs.spans[group, 1]
        columns = pl.ds(column * self.how.columns, self.how.columns)
        return _Place(group, first, steps, row * TILE, columns), steps

    def load(self, place: _Place, k: Any, slot: Any) -> None:
        refs, here = self.refs, self.barriers.here.at[slot]
        row, is_first, is_last = place.first + k * WIDTH, k == 0, k == place.steps - 1

        def left(ref: Any, row: Any) -> None:
            for worker in range(WORKERS):
                own = ref.at[pl.ds(row, WIDTH), pl.ds(place.down + worker * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(own, self.memory.left.at[slot, worker], here)

        edge = (2 * place.group + jnp.where(is_first, 0, 1)) * WIDTH
        pl.when(is_first | is_last)(lambda: left(refs.edges, edge))
        pl.when(~(is_first | is_last))(lambda: left(refs.x_MK, row))
        d_out = refs.d_out_MN.at[pl.ds(row, WIDTH), place.columns]
        plgpu.copy_gmem_to_smem(d_out, self.memory.right.at[slot], here)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.left.at[slot, worker].transpose((1, 0)), self.memory.right.at[slot])

    def write(self, place: _Place, worker: Any, sums: jax.Array) -> None:
        rows = pl.ds(place.down + worker * ROWS, ROWS)
        self.write_block(sums, worker, self.out_ref.at[place.group, rows, place.columns])
