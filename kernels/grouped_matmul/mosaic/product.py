"""Rows by the matrix of their group."""

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

from maxhydra.kernels.grouped_matmul.triton import _tiles as table


@partial(jax.jit, static_argnames=("tile", "turned", "programs"))
def product(x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, tile: Tile, turned: bool, programs: int) -> jax.Array:
    """x times w [E, K, N], or [E, N, K] if turned."""
    (M, K), E, dtype = x_MK.shape, w.shape[0], x_MK.dtype
    N = w.shape[1] if turned else w.shape[2]
    C = tile.columns
    right = (tile.stages, C, SUMMED) if turned else (tile.stages, SUMMED, C)
    shared = Memory(
        left=memory(tile.stages, WORKERS, ROWS, SUMMED, dtype=dtype),
        right=memory(*right, dtype=dtype),
        out=memory(WORKERS, ROWS, WRITTEN, dtype=dtype),
        few=plgpu.SMEM((WORKERS, ROWS, WRITTEN), dtype),
    )

    def kernel(
        tiles_ref: Any, used_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any, memory: Memory, barriers: Barriers
    ) -> None:
        def over_tiles(act: Any) -> None:
            program, used = jax.lax.axis_index("program"), used_ref[0]
            total = used * (N // C)

            def one(i: Any, n: Any) -> Any:
                t, column = place(program + i * programs, used, N // C, tile.band)
                group, block, first, end = (tiles_ref[t, j] for j in range(4))
                steps = jnp.where((group < E) & (first < end), jnp.int32(K // SUMMED), 0)
                act((group, block * TILE, (first, end), column * C), steps, n)
                return n + steps

            count = jax.lax.div(total - program + (programs - 1), jnp.int32(programs))
            jax.lax.fori_loop(0, count, one, jnp.int32(0))

        def load(of_tile: Any, k: Any, slot: Any, here: Any) -> None:
            group, start, _, column = of_tile
            part, columns = pl.ds(k * SUMMED, SUMMED), pl.ds(column, C)
            for worker in range(WORKERS):
                rows = pl.ds(start + worker * ROWS, ROWS)
                plgpu.copy_gmem_to_smem(x_ref.at[rows, part], memory.left.at[slot, worker], here)
            own = w_ref.at[group, columns, part] if turned else w_ref.at[group, part, columns]
            plgpu.copy_gmem_to_smem(own, memory.right.at[slot], here)

        def multiply(sums_ref: Any, worker: Any, slot: Any) -> None:
            right = memory.right.at[slot]
            plgpu.wgmma(sums_ref, memory.left.at[slot, worker], right.transpose((1, 0)) if turned else right)

        def write(of_tile: Any, worker: Any, sums: jax.Array) -> None:
            _, start, (first, end), column = of_tile
            start, short = start + worker * ROWS, sums.astype(dtype)
            first, end = jnp.maximum(first - start, 0), jnp.minimum(end - start, ROWS)
            rows = end - first
            parts = [(short[:, c : c + WRITTEN], pl.ds(column + c, WRITTEN)) for c in range(0, C, WRITTEN)]

            @pl.when(rows == ROWS)
            def _all() -> None:
                write_all(memory.out, worker, parts, out_ref, pl.ds(start, ROWS))

            @pl.when((rows > 0) & (rows < ROWS))
            def _few() -> None:
                for part, columns in parts:
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    memory.few[worker] = part
                    plgpu.commit_smem()
                    # Copies are of a size that is known beforehand: those of the bits of the number of rows.
                    size = ROWS // 2
                    while size:
                        before = first + (rows & ~(2 * size - 1))

                        @pl.when(rows & size != 0)
                        def _copy(size: int = size, before: Any = before, columns: Any = columns) -> None:
                            some = memory.few.at[worker, pl.ds(before, size)]
                            plgpu.copy_smem_to_gmem(some, out_ref.at[pl.ds(start + before, size), columns])

                        size //= 2

        Loop(barriers, tile.stages, tile.delay).run(over_tiles, load, multiply, write, (ROWS, C))

    tiles = table(sizes_E, M, TILE)
    used = jnp.sum(tiles[:, 2] < tiles[:, 3], dtype=jnp.int32)[None]
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((M, N), dtype),
        scratch_types=(shared, Barriers.of(WORKERS + 1, tile.stages)),
        grid=(programs,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        kernel_name="grouped_matmul",
    )(tiles, used, x_MK, w)
