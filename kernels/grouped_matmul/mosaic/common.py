"""Shared memory, barriers and the persistent tile loop of the grouped matmul kernels."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic import KernelParams
from maxhydra.kernels.mosaic import ROWS, WORKERS, shared_memory, slot_of

# Rows of a tile.
TILE = WORKERS * ROWS
# Terms of the sum per step, and columns per copy of a partial block: one row of a swizzled block.
WIDTH = 64
# Alignment of the first row of a block, required by the swizzled layout.
ALIGN = 8


class Memory(NamedTuple):
    lhs: Any
    rhs: Any
    out: Any
    partial_rows: Any
    """Row-major buffer for blocks of which only some rows are written."""

    @classmethod
    def of(cls, params: KernelParams, lhs: tuple[int, int], rhs: tuple[int, int], *, dtype: Any) -> "Memory":
        return cls(
            lhs=shared_memory(params.stages, WORKERS, *lhs, dtype=dtype),
            rhs=shared_memory(params.stages, *rhs, dtype=dtype),
            out=shared_memory(WORKERS, ROWS, params.columns, dtype=dtype),
            partial_rows=plgpu.SMEM((WORKERS, ROWS, WIDTH), dtype),
        )


class Barriers(NamedTuple):
    """Barriers for data that has arrived in shared memory, and for slots that may be overwritten."""

    ready: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class Program(abc.ABC):
    """A persistent kernel program: its tiles, and the work of a warpgroup on each of them."""

    name: ClassVar[str]
    params: KernelParams
    refs: Any
    out_ref: Any
    memory: Any
    """Shared memory; write_block uses its field `out`."""
    barriers: Barriers

    @abc.abstractmethod
    def position(self, number: Any) -> tuple[Any, Any]:
        """Location of the tile with this number, and its number of steps."""

    @property
    @abc.abstractmethod
    def count(self) -> Any:
        """Number of tiles of all programs."""

    @abc.abstractmethod
    def load(self, position: Any, k: Any, slot: Any) -> None:
        """Issue the copies of a step."""

    @abc.abstractmethod
    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None: ...

    @abc.abstractmethod
    def write(self, position: Any, worker: Any, sums: jax.Array) -> None: ...

    def run(self) -> None:
        worker = jax.lax.axis_index("warpgroup")

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self.for_each_tile(self.load_all)

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            for slot in range(self.params.stages):
                plgpu.barrier_arrive(self.barriers.free.at[slot])

            def process(position: Any, steps: Any, n: Any) -> None:
                def matmul(sums_ref: Any) -> jax.Array:
                    return self.matmul(sums_ref, worker, steps, n)

                sums = pl.run_scoped(matmul, plgpu.ACC((ROWS, self.params.columns), jnp.float32))
                self.write(position, worker, sums)

            self.for_each_tile(process)
            plgpu.wait_smem_to_gmem(0)

    def for_each_tile(self, visit: Callable[[Any, Any, Any], None]) -> None:
        """Call visit(location, number of steps, steps before it) for every tile of this program.

        Every program has a tile of each round. They are in reverse order in every other round: where tiles are sorted
        by their number of steps, the program with the longest tile of a round has the shortest of the next.
        """
        program, programs = jax.lax.axis_index("program"), jnp.int32(self.params.processors)

        def place(i: Any) -> Any:
            return jnp.where(jax.lax.rem(i, 2) == 0, program, programs - 1 - program)

        def step(i: Any, n: Any) -> Any:
            position, steps = self.position(i * programs + place(i))
            visit(position, steps, n)
            return n + steps

        rounds, rest = jax.lax.div(self.count, programs), jax.lax.rem(self.count, programs)
        jax.lax.fori_loop(0, rounds + (place(rounds) < rest).astype(jnp.int32), step, jnp.int32(0))

    def load_all(self, position: Any, steps: Any, n: Any) -> None:
        def step(k: Any, _: Any) -> None:
            slot = slot_of(n + k, self.params.stages)
            plgpu.barrier_wait(self.barriers.free.at[slot])
            self.load(position, k, slot)

        jax.lax.fori_loop(0, steps, step, None)

    def matmul(self, sums_ref: Any, worker: Any, steps: Any, n: Any) -> jax.Array:
        """Accumulate a tile. The slot of a step is freed once its wgmma has finished and the next one has started."""

        def step(k: Any, _: Any) -> None:
            slot = slot_of(n + k, self.params.stages)
            plgpu.barrier_wait(self.barriers.ready.at[slot])
            self.multiply(sums_ref, worker, slot)
            plgpu.wgmma_wait(1)
            self.free(n + k - 1, k > 0)

        jax.lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        self.free(n + steps - 1, steps > 0)
        return sums_ref[...]

    def free(self, n: Any, is_done: Any) -> None:
        """Release the slot of step n, if there was one."""

        @pl.when(is_done)
        def _free() -> None:
            plgpu.barrier_arrive(self.barriers.free.at[slot_of(n, self.params.stages)])

    def write_block(self, sums: jax.Array, worker: Any, out_ref: Any) -> None:
        """Write a block of which all rows belong to this tile."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.memory.out[worker] = sums.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.memory.out.at[worker], out_ref)


def launch(
    kind: Callable[..., Program],
    params: KernelParams,
    memory: Any,
    out: jax.ShapeDtypeStruct,
    refs: Any,
    *,
    name: str,
    copies: int,
) -> jax.Array:
    """Launch the kernel of a program class on its inputs; `copies`: loads per step."""
    barriers = Barriers(
        ready=plgpu.Barrier(num_arrivals=copies, num_barriers=params.stages),
        free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=params.stages),
    )

    def kernel(*arrays: Any) -> None:
        kind(params, *arrays).run()

    out_array: jax.Array = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=(memory, barriers),
        grid=(params.processors,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )(refs)
    return out_array
