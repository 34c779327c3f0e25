"""Sums over the rows of each group: the gradient of its matrix.

The first and the last step of a group may contain rows of other groups. They are read from a copy in which those rows
are zero.
"""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.grouped_matmul.mosaic.common import ALIGN, TILE, WIDTH, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.tiles import edges, spans, tile_position
from maxhydra.kernels.mosaic import ROWS, WORKERS


class Refs(NamedTuple):
    spans: Any
    """Group, its first row and number of steps; the longest group first."""
    x_MK: Any
    edges: Any
    """First and last step of each group."""
    d_out_MN: Any


@partial(jax.jit, static_argnames="params")
def weight_grad(params: KernelParams, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, K, N]: x^T times d_out over the rows of each group."""
    K, N, dtype = x_MK.shape[1], d_out_MN.shape[1], x_MK.dtype
    params = params.fitted(N)
    memory = Memory.of(params, (WIDTH, ROWS), (WIDTH, params.columns), dtype=dtype)
    first_E, steps_E = spans(sizes_E, WIDTH, ALIGN)
    # A program has about 50 tiles of different groups, and the slowest one determines the time.
    order_E = jnp.argsort(-steps_E).astype(jnp.int32)
    table = jnp.stack([order_E, first_E[order_E], steps_E[order_E]], axis=1)
    refs = Refs(table, x_MK, edges(x_MK, sizes_E, WIDTH, ALIGN), d_out_MN)
    out = jax.ShapeDtypeStruct((len(sizes_E), K, N), dtype)
    return launch(
        _WeightGrad, params, memory._replace(partial_rows=None), out, refs, name=_WeightGrad.name, copies=WORKERS + 1
    )


class _Position(NamedTuple):
    group: Any
    first: Any
    """First row of the first step."""
    steps: Any
    down: Any
    """First row of the tile in the matrix."""
    columns: Any


@dataclasses.dataclass(frozen=True)
class _WeightGrad(Program):
    name: ClassVar[str] = "grouped_matmul_weight_grad"

    @property
    def sizes(self) -> tuple[int, int]:
        """Tiles of a matrix, by rows and by columns."""
        _, K, N = self.out_ref.shape
        return pl.cdiv(K, TILE), pl.cdiv(N, self.params.columns)

    @property
    def count(self) -> Any:
        down, across = self.sizes
        return jnp.int32(self.out_ref.shape[0] * down * across)

    def position(self, number: Any) -> tuple[_Position, Any]:
        down, across = self.sizes
        rank, number = jax.lax.div(number, jnp.int32(down * across)), jax.lax.rem(number, jnp.int32(down * across))
        row, column = tile_position(number, down, across, self.params.band)
        group, first, steps = (self.refs.spans[rank, i] for i in range(3))
        columns = pl.ds(column * self.params.columns, self.params.columns)
        return _Position(group, pl.multiple_of(first, ALIGN), steps, row * TILE, columns), steps

    def load(self, position: _Position, k: Any, slot: Any) -> None:
        refs, ready = self.refs, self.barriers.ready.at[slot]
        row, is_first, is_last = position.first + k * WIDTH, k == 0, k == position.steps - 1

        def load_lhs(ref: Any, row: Any) -> None:
            for worker in range(WORKERS):
                block = ref.at[pl.ds(row, WIDTH), pl.ds(position.down + worker * ROWS, ROWS)]
                plgpu.copy_gmem_to_smem(block, self.memory.lhs.at[slot, worker], ready)

        edge = (2 * position.group + jnp.where(is_first, 0, 1)) * WIDTH
        pl.when(is_first | is_last)(lambda: load_lhs(refs.edges, edge))
        pl.when(~(is_first | is_last))(lambda: load_lhs(refs.x_MK, row))
        d_out = refs.d_out_MN.at[pl.ds(row, WIDTH), position.columns]
        plgpu.copy_gmem_to_smem(d_out, self.memory.rhs.at[slot], ready)

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.lhs.at[slot, worker].transpose((1, 0)), self.memory.rhs.at[slot])

    def write(self, position: _Position, worker: Any, sums: jax.Array) -> None:
        rows = pl.ds(position.down + worker * ROWS, ROWS)
        self.write_block(sums, worker, self.out_ref.at[position.group, rows, position.columns])
