"""What the kernels share: shared memory, and the steps of a program over its tiles."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.params import How
from maxhydra.kernels.mosaic import ROWS, WORKERS, memory, slot_of

# Rows of a tile.
TILE = WORKERS * ROWS
# Terms of a sum at a time, and columns of few rows: a row of a block as the matrix unit wants it.
WIDTH = 64
# What the first row of a block must be a multiple of, in the order in which the matrix unit reads it.
ALIGN = 8


class Memory(NamedTuple):
    left: Any
    right: Any
    out: Any
    few: Any
    """Of a block of which not all rows are written, as rows."""

    @classmethod
    def of(cls, how: How, left: tuple[int, int], right: tuple[int, int], *, dtype: Any) -> "Memory":
        return cls(
            left=memory(how.stages, WORKERS, *left, dtype=dtype),
            right=memory(how.stages, *right, dtype=dtype),
            out=memory(WORKERS, ROWS, how.columns, dtype=dtype),
            few=plgpu.SMEM((WORKERS, ROWS, WIDTH), dtype),
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    here: Any
    free: Any


@dataclasses.dataclass(frozen=True)
class Program(abc.ABC):
    """A kernel's program: its tiles, and what a warpgroup does with each."""

    name: ClassVar[str]
    how: How
    refs: Any
    out_ref: Any
    memory: Any
    """Shared memory; write_block takes `out` of it."""
    barriers: Barriers

    @abc.abstractmethod
    def place(self, number: Any) -> tuple[Any, Any]:
        """Where the tile of a number is, and of how many steps."""

    @property
    @abc.abstractmethod
    def count(self) -> Any:
        """Tiles of all programs."""

    @abc.abstractmethod
    def load(self, place: Any, k: Any, slot: Any) -> None:
        """Begin the copies of a step."""

    @abc.abstractmethod
    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None: ...

    @abc.abstractmethod
    def write(self, place: Any, worker: Any, sums: jax.Array) -> None: ...

    def run(self) -> None:
        worker = jax.lax.axis_index("warpgroup")

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            self.over_tiles(self.load_all)

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            for slot in range(self.how.stages):
                plgpu.barrier_arrive(self.barriers.free.at[slot])

            def one(place: Any, steps: Any, n: Any) -> None:
                def product(sums_ref: Any) -> jax.Array:
                    return self.product(sums_ref, worker, steps, n)

                sums = pl.run_scoped(product, plgpu.ACC((ROWS, self.how.columns), jnp.float32))
                self.write(place, worker, sums)

            self.over_tiles(one)
            plgpu.wait_smem_to_gmem(0)

    def over_tiles(self, act: Callable[[Any, Any, Any], None]) -> None:
        """`act` on every tile of this program: where it is, its steps, and those before it."""
        program, programs = jax.lax.axis_index("program"), jnp.int32(self.how.processors)

        def one(i: Any, n: Any) -> Any:
            place, steps = self.place(program + i * programs)
            act(place, steps, n)
            return n + steps

        jax.lax.fori_loop(0, jax.lax.div(self.count - program + programs - 1, programs), one, jnp.int32(0))

    def load_all(self, place: Any, steps: Any, n: Any) -> None:
        def step(k: Any, _: Any) -> None:
            slot = slot_of(n + k, self.how.stages)
            plgpu.barrier_wait(self.barriers.free.at[slot])
            self.load(place, k, slot)

        jax.lax.fori_loop(0, steps, step, None)

    def product(self, sums_ref: Any, worker: Any, steps: Any, n: Any) -> jax.Array:
        """A step's room is free when the next step's product has begun and its own has ended."""

        def step(k: Any, _: Any) -> None:
            slot = slot_of(n + k, self.how.stages)
            plgpu.barrier_wait(self.barriers.here.at[slot])
            self.multiply(sums_ref, worker, slot)
            plgpu.wgmma_wait(1)
            self.free(n + k - 1, k > 0)

        jax.lax.fori_loop(0, steps, step, None)
        plgpu.wgmma_wait(0)
        self.free(n + steps - 1, steps > 0)
        return sums_ref[...]

    def free(self, n: Any, is_done: Any) -> None:
        """The room of step n, if there was one."""

        @pl.when(is_done)
        def _free() -> None:
            plgpu.barrier_arrive(self.barriers.free.at[slot_of(n, self.how.stages)])

    def write_block(self, sums: jax.Array, worker: Any, out_ref: Any) -> None:
        """To rows of the output that are all written."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        self.memory.out[worker] = sums.astype(out_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.memory.out.at[worker], out_ref)


def launch(
    kind: Callable[..., Program], how: How, memory: Any, out: jax.ShapeDtypeStruct, refs: Any, *, name: str, copies: int
) -> jax.Array:
    """The kernel of a kind of program on what it reads, by so many copies a step."""
    barriers = Barriers(
        here=plgpu.Barrier(num_arrivals=copies, num_barriers=how.stages),
        free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=how.stages),
    )

    def kernel(*arrays: Any) -> None:
        kind(how, *arrays).run()

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=(memory, barriers),
        grid=(how.processors,),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=name,
    )(refs)
    return made
