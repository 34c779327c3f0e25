"""What the kernels share: sizes of tiles, shared memory, and the loop of programs over tiles."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

# Rows of a product of the matrix unit, which a warpgroup has of its own.
ROWS = 64
# Warpgroups of a program that compute; one more loads.
WORKERS = 2
# Rows of a tile.
TILE = WORKERS * ROWS
# Terms of a sum at a time: a row of a swizzled block.
SUMMED = 64
# Columns of a tile that are written at a time.
WRITTEN = 64
PARAMS = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


class Tile(NamedTuple):
    """How a program makes its products."""

    columns: int
    stages: int
    band: int
    delay: int
    """Tiles of rows that pass over the columns together, so that both operands are found in the cache."""


def memory(*shape: int, dtype: Any) -> Any:
    """Shared memory for matrices, in the order in which the matrix unit reads them."""
    swizzle = 128
    columns = swizzle // jnp.dtype(dtype).itemsize
    return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)))


class Memory(NamedTuple):
    left: Any
    right: Any
    out: Any
    few: Any
    """Rows that do not fill a block."""


class Barriers(NamedTuple):
    here: Any
    free: Any

    @classmethod
    def of(cls, copies: int, stages: int) -> "Barriers":
        return cls(
            here=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
        )


@dataclasses.dataclass(frozen=True)
class Loop:
    """What a program does with its tiles: a warpgroup loads, the others multiply."""

    barriers: Barriers
    stages: int
    delay: int

    def free_if(self, condition: Any, n: Any) -> None:
        @pl.when(condition)
        def _free() -> None:
            plgpu.barrier_arrive(self.barriers.free.at[slot_of(n, self.stages)])

    def run(
        self,
        over_tiles: Callable[[Callable], None],
        load: Callable,
        multiply: Callable,
        write: Callable,
        shape: tuple[int, int],
    ) -> None:
        worker = jax.lax.axis_index("warpgroup")

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")

            def one(tile: Any, steps: Any, n: Any) -> None:
                def step(k: Any, _: Any) -> None:
                    slot = slot_of(n + k, self.stages)
                    plgpu.barrier_wait(self.barriers.free.at[slot])
                    load(tile, k, slot, self.barriers.here.at[slot])

                jax.lax.fori_loop(0, steps, step, None)

            over_tiles(one)

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            for slot in range(self.stages):
                plgpu.barrier_arrive(self.barriers.free.at[slot])

            def one(tile: Any, steps: Any, n: Any) -> None:
                def product(sums_ref: Any) -> jax.Array:
                    def step(k: Any, _: Any) -> None:
                        slot = slot_of(n + k, self.stages)
                        plgpu.barrier_wait(self.barriers.here.at[slot])
                        multiply(sums_ref, worker, slot)
                        plgpu.wgmma_wait(self.delay)
                        if self.delay:
                            self.free_if(k > 0, n + k - 1)
                        else:
                            plgpu.barrier_arrive(self.barriers.free.at[slot])

                    jax.lax.fori_loop(0, steps, step, None)
                    if self.delay:
                        plgpu.wgmma_wait(0)
                        self.free_if(steps > 0, n + steps - 1)
                    return sums_ref[...]

                write(tile, worker, pl.run_scoped(product, plgpu.ACC(shape, jnp.float32)))

            over_tiles(one)
            plgpu.wait_smem_to_gmem(0)


def write(out_ref: Any, worker: Any, parts: list, target_ref: Any, rows: Any) -> None:
    """Columns of a block of rows, some at a time."""
    for part, columns in parts:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out_ref[worker] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_ref.at[worker], target_ref.at[rows, columns])


def place(number: Any, rows: Any, columns: int, band: int) -> tuple[Any, Any]:
    """Row and column of a tile: down the rows of a band, then on to the next column."""
    size = jnp.int32(band * columns)
    first = jax.lax.div(number, size) * band
    height = jnp.minimum(rows - first, band)
    within = jax.lax.rem(number, size)
    return first + jax.lax.rem(within, height), jax.lax.div(within, height)


def slot_of(n: Any, stages: int) -> Any:
    return jax.lax.rem(n, jnp.int32(stages))
