"""Rows times the matrix of their group. A tile starts at its group's first row, or up to seven rows before it."""

import dataclasses
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.grouped_matmul.mosaic.common import ALIGN, TILE, WIDTH, Memory, Program, launch
from maxhydra.kernels.grouped_matmul.tiles import Pair, schedule
from maxhydra.kernels.mosaic import ROWS, WORKERS


class Refs(NamedTuple):
    tiles: Any
    """Group, first row of the tile, first row of the group, its end, index of the column tile."""
    num_tiles: Any
    """The number of tiles in use."""
    x_MK: tuple[Any, ...]
    w: tuple[Any, ...]
    """[E, K, N], or [E, N, K]. The result is the sum of x[i] times w[i]."""


@partial(jax.jit, static_argnames=("params", "transposed"))
def matmul(params: KernelParams, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
    """x times w [E, K, N], or [E, N, K] if transposed."""
    return _launch_matmul(params, (x_MK,), (w,), sizes_E, transposed=transposed)


@partial(jax.jit, static_argnames=("params",))
def matmul_sum(params: KernelParams, x: Pair, w: Pair, sizes_E: jax.Array) -> jax.Array:
    """x[0] [M, K] times w[0] [E, N, K], plus x[1] times w[1], added in the accumulator."""
    return _launch_matmul(params, x, w, sizes_E, transposed=True)


def _launch_matmul(
    params: KernelParams, x: tuple[jax.Array, ...], w: tuple[jax.Array, ...], sizes_E: jax.Array, *, transposed: bool
) -> jax.Array:
    M, N = x[0].shape[0], w[0].shape[1] if transposed else w[0].shape[2]
    params = params.fitted(N)
    right = (params.columns, WIDTH) if transposed else (WIDTH, params.columns)
    memory = Memory.of(params, (ROWS, WIDTH), right, dtype=x[0].dtype)
    # Rows of no group form an extra group without steps.
    sizes_G = jnp.append(sizes_E, M - jnp.sum(sizes_E))
    tiles, num_tiles = schedule(
        sizes_G, M, rows=TILE, columns=pl.cdiv(N, params.columns), align=ALIGN, band=params.band
    )
    out = jax.ShapeDtypeStruct((M, N), x[0].dtype)
    kind = _TransposedMatmul if transposed else _Matmul
    return launch(kind, params, memory, out, Refs(tiles, num_tiles, x, w), name=kind.name, copies=WORKERS + 1)


class _Position(NamedTuple):
    group: Any
    row: Any
    """First row of the tile."""
    first: Any
    """First row of the group."""
    end: Any
    column: Any
    """First column of the tile."""


@dataclasses.dataclass(frozen=True)
class _Matmul(Program):
    name: ClassVar[str] = "grouped_matmul"

    @property
    def count(self) -> Any:
        return self.refs.num_tiles[0]

    def position(self, number: Any) -> tuple[_Position, Any]:
        group, row, first, end, column = (self.refs.tiles[number, i] for i in range(5))
        steps = jnp.where(group < self.refs.w[0].shape[0], jnp.int32(len(self.refs.w) * self.steps), 0)
        return _Position(group, pl.multiple_of(row, ALIGN), first, end, column * self.params.columns), steps

    @property
    def steps(self) -> int:
        """Steps of one x."""
        return int(self.refs.x_MK[0].shape[1]) // WIDTH

    def load(self, position: _Position, k: Any, slot: Any) -> None:
        operands = list(zip(self.refs.x_MK, self.refs.w, strict=True))
        if len(operands) == 1:
            self.load_step(operands[0], position, k, slot)
            return
        for number, pair in enumerate(operands):
            step = k - number * self.steps
            pl.when((step >= 0) & (step < self.steps))(partial(self.load_step, pair, position, step, slot))

    def load_step(self, operands: tuple[Any, Any], position: _Position, k: Any, slot: Any) -> None:
        (x_ref, w_ref), inputs, ready = operands, pl.ds(k * WIDTH, WIDTH), self.barriers.ready.at[slot]
        for worker in range(WORKERS):
            rows = x_ref.at[pl.ds(position.row + worker * ROWS, ROWS), inputs]
            plgpu.copy_gmem_to_smem(rows, self.memory.lhs.at[slot, worker], ready)
        plgpu.copy_gmem_to_smem(self.right(w_ref, position, inputs), self.memory.rhs.at[slot], ready)

    def columns(self, position: _Position) -> Any:
        return pl.ds(position.column, self.params.columns)

    def right(self, w_ref: Any, position: _Position, inputs: Any) -> Any:
        return w_ref.at[position.group, inputs, self.columns(position)]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.lhs.at[slot, worker], self.memory.rhs.at[slot])

    def write(self, position: _Position, worker: Any, sums: jax.Array) -> None:
        """Write only the rows of this group: another program writes the others."""
        row = position.row + worker * ROWS
        first, end = jnp.maximum(position.first - row, 0), jnp.minimum(position.end - row, ROWS)

        @pl.when(end - first == ROWS)
        def _all() -> None:
            self.write_block(sums, worker, self.out_ref.at[pl.ds(row, ROWS), self.columns(position)])

        @pl.when((end - first > 0) & (end - first < ROWS))
        def _few() -> None:
            self.write_partial(sums, worker, (row, first, end - first), position.column)

    def write_partial(self, sums: jax.Array, worker: Any, rows: tuple[Any, Any, Any], column: Any) -> None:
        """Copies have static sizes: issue one for each set bit of the number of rows."""
        (row, first, count), partial_rows, narrow = rows, self.memory.partial_rows, sums.astype(self.out_ref.dtype)
        for c in range(0, self.params.columns, WIDTH):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            partial_rows[worker] = narrow[:, c : c + WIDTH]
            plgpu.commit_smem()
            for bit in range(ROWS.bit_length() - 1):
                size = 1 << bit
                start = first + (count & ~(2 * size - 1))
                block = partial_rows.at[worker, pl.ds(start, size)]
                destination = self.out_ref.at[pl.ds(row + start, size), pl.ds(column + c, WIDTH)]
                pl.when(count & size != 0)(partial(plgpu.copy_smem_to_gmem, block, destination))


@dataclasses.dataclass(frozen=True)
class _TransposedMatmul(_Matmul):
    """With matrices [E, N, K]."""

    name: ClassVar[str] = "grouped_matmul_transposed"

    def right(self, w_ref: Any, position: _Position, inputs: Any) -> Any:
        return w_ref.at[position.group, self.columns(position), inputs]

    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None:
        plgpu.wgmma(sums_ref, self.memory.lhs.at[slot, worker], self.memory.rhs.at[slot].transpose((1, 0)))
