"""Sums over the rows of each group: the gradient of its matrix."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.parts import (
    PARAMS,
    ROWS,
    SUMMED,
    TILE,
    WORKERS,
    WRITTEN,
    Barriers,
    Loop,
    Memory,
    Tile,
    memory,
    place,
)
from maxhydra.kernels.grouped_matmul.mosaic.parts import write as write_all
from maxhydra.kernels.grouped_matmul.triton import _edges as edges


@partial(jax.jit, static_argnames=("tile", "programs"))
def summed(x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array, *, tile: Tile, programs: int) -> jax.Array:
    """[E, K, N]: x^T times d_out over the rows of each group."""
    (M, K), N, E, dtype = x_MK.shape, d_out_MN.shape[1], len(sizes_E), x_MK.dtype
    C = tile.columns
    shared = Memory(
        left=memory(tile.stages, WORKERS, SUMMED, ROWS, dtype=dtype),
        right=memory(tile.stages, SUMMED, C, dtype=dtype),
        out=memory(WORKERS, ROWS, WRITTEN, dtype=dtype),
        few=None,
    )
    sizes_E = sizes_E.astype(jnp.int32)
    end_E = jnp.cumsum(sizes_E)
    start_E = end_E - sizes_E
    first_E = start_E // SUMMED
    count_E = jnp.where(sizes_E > 0, -(-end_E // SUMMED) - first_E, 0)
    down, across = K // TILE, N // C
    tiles = E * down * across

    def kernel(
        groups_ref: Any, x_ref: Any, edges_ref: Any, d_out_ref: Any, out_ref: Any, memory: Memory, barriers: Barriers
    ) -> None:
        def over_tiles(act: Any) -> None:
            program = jax.lax.axis_index("program")

            def one(i: Any, n: Any) -> Any:
                number = program + i * programs
                group = jax.lax.div(number, jnp.int32(down * across))
                row, column = place(jax.lax.rem(number, jnp.int32(down * across)), down, across, tile.band)
                first, steps = groups_ref[group, 0], groups_ref[group, 1]
                act((group, first, steps, row * TILE, column * C), steps, n)
                return n + steps

            jax.lax.fori_loop(0, jax.lax.div(tiles - program + (programs - 1), jnp.int32(programs)), one, jnp.int32(0))

        def load(of_tile: Any, k: Any, slot: Any, here: Any) -> None:
            group, first, steps, row, column = of_tile
            is_edge = (k == 0) | (k == steps - 1)

            def left(ref: Any, block: Any) -> None:
                for worker in range(WORKERS):
                    some = pl.ds(row + worker * ROWS, ROWS)
                    plgpu.copy_gmem_to_smem(
                        ref.at[pl.ds(block * SUMMED, SUMMED), some], memory.left.at[slot, worker], here
                    )

            pl.when(is_edge)(lambda: left(edges_ref, 2 * group + jnp.where(k == 0, 0, 1)))
            pl.when(jnp.logical_not(is_edge))(lambda: left(x_ref, first + k))
            rows = pl.ds((first + k) * SUMMED, SUMMED)
            plgpu.copy_gmem_to_smem(d_out_ref.at[rows, pl.ds(column, C)], memory.right.at[slot], here)

        def multiply(sums_ref: Any, worker: Any, slot: Any) -> None:
            plgpu.wgmma(sums_ref, memory.left.at[slot, worker].transpose((1, 0)), memory.right.at[slot])

        def write(of_tile: Any, worker: Any, sums: jax.Array) -> None:
            group, _, _, row, column = of_tile
            short = sums.astype(dtype)
            parts = [(short[:, c : c + WRITTEN], pl.ds(column + c, WRITTEN)) for c in range(0, C, WRITTEN)]
            write_all(memory.out, worker, parts, out_ref.at[group], pl.ds(row + worker * ROWS, ROWS))

        Loop(barriers, tile.stages, tile.delay).run(over_tiles, load, multiply, write, (ROWS, C))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((E, K, N), dtype),
        scratch_types=(shared, Barriers.of(WORKERS + 1, tile.stages)),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        kernel_name="grouped_matmul_summed",
    )(jnp.stack([first_E, count_E], axis=1), x_MK, edges(x_MK, start_E, end_E, SUMMED), d_out_MN)
