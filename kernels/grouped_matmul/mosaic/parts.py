"""What the kernels share: shared memory, and the steps of a program over its tiles."""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.grouped_matmul.mosaic.how import How, Tile
from maxhydra.kernels.mosaic import ROWS, WORKERS, memory

# Rows of a tile.
TILE = WORKERS * ROWS
# Terms of a sum at a time, and columns that are written at a time: a row of a block as the matrix unit wants it.
WIDTH = 64
# What the first row of a block must be a multiple of, in the order in which the matrix unit reads it.
ALIGN = 8
# Blocks of a warpgroup that are on their way to the output at a time.
LEAVING = 2
# Of a cluster.
AXES = ("down", "across")


class Memory(NamedTuple):
    left: Any
    right: Any
    out: Any
    """As the matrix unit has it, or as rows where not all of a block are written."""

    @classmethod
    def of(cls, tile: Tile, left: tuple[int, int], right: tuple[int, int], *, dtype: Any) -> "Memory":
        leaving = (WORKERS, LEAVING, ROWS, WIDTH)
        return cls(
            left=memory(tile.stages, WORKERS, *left, dtype=dtype),
            right=memory(tile.stages, *right, dtype=dtype),
            out=plgpu.RefUnion(memory(*leaving, dtype=dtype), plgpu.SMEM(leaving, dtype)),
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, of what may be written over, and of the lead of the first warpgroup."""

    here: Any
    free: Any
    lead: Any

    @classmethod
    def of(cls, tile: Tile) -> "Barriers":
        barrier = plgpu.Barrier if tile.cluster == 1 else partial(plgpu.ClusterBarrier, collective_axes=AXES)
        return cls(
            here=plgpu.Barrier(num_arrivals=WORKERS + 1, num_barriers=tile.stages),
            free=barrier(num_arrivals=WORKERS, num_barriers=tile.stages),
            lead=plgpu.Barrier(),
        )


@dataclasses.dataclass(frozen=True)
class Program(abc.ABC):
    """A kernel's program: its tiles, and what a warpgroup does with each."""

    name: ClassVar[str]
    tile: Tile
    programs: int
    refs: Any
    out_ref: Any
    memory: Memory
    barriers: Barriers

    @abc.abstractmethod
    def place(self, number: Any) -> tuple[Any, Any]:
        """Where the tile of a number is, and of how many steps."""

    @property
    @abc.abstractmethod
    def count(self) -> Any:
        """Tiles of all clusters."""

    @abc.abstractmethod
    def load(self, place: Any, k: Any, slot: Any) -> None:
        """Begin the copies of a step: two of the left side and one of the right."""

    @abc.abstractmethod
    def multiply(self, sums_ref: Any, worker: Any, slot: Any) -> None: ...

    @abc.abstractmethod
    def write(self, place: Any, worker: Any, sums: jax.Array) -> None: ...

    @property
    def at(self) -> tuple[Any, Any]:
        """This program's place in its cluster, down and across."""
        sizes = zip(AXES, (self.tile.down, self.tile.across), strict=True)
        down, across = (jax.lax.axis_index(axis) if size > 1 else jnp.int32(0) for axis, size in sizes)
        return down, across

    def run(self) -> None:
        worker, stages = jax.lax.axis_index("warpgroup"), self.tile.stages

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(40, action="decrease")
            steps = self.over_tiles(self.load_all)
            if self.tile.cluster > 1:
                # The others of the cluster tell this one what is free, for which it has to be there.
                for slot in range(stages):
                    plgpu.barrier_wait(self.barriers.free.at[self.slot(steps + slot)])

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(232, action="increase")
            for slot in range(stages):
                plgpu.barrier_arrive(self.barriers.free.at[slot])

            def one(place: Any, steps: Any, n: Any) -> None:
                def product(sums_ref: Any) -> jax.Array:
                    return self.product(sums_ref, worker, steps, n)

                sums = pl.run_scoped(product, plgpu.ACC((ROWS, self.tile.columns), jnp.float32))
                self.write(place, worker, sums)

            self.over_tiles(one)
            plgpu.wait_smem_to_gmem(0)

    def over_tiles(self, act: Callable[[Any, Any, Any], None]) -> Any:
        """`act` on every tile of this program: where it is, its steps, and those before it. The steps of all."""
        program, programs = jax.lax.axis_index("program"), jnp.int32(self.programs)

        def one(i: Any, n: Any) -> Any:
            place, steps = self.place(program + i * programs)
            act(place, steps, n)
            return n + steps

        tiles = jax.lax.div(self.count - program + programs - 1, programs)
        return jax.lax.fori_loop(0, tiles, one, jnp.int32(0))

    def load_all(self, place: Any, steps: Any, n: Any) -> None:
        def step(k: Any, _: Any) -> None:
            slot = self.slot(n + k)
            plgpu.barrier_wait(self.barriers.free.at[slot])
            self.load(place, k, slot)

        jax.lax.fori_loop(0, steps, step, None)

    def copy_left(self, source: Any, worker: int, slot: Any) -> None:
        axes = "across" if self.tile.across > 1 else None
        self.copy(source, self.memory.left.at[slot, worker], slot, axes)

    def copy_right(self, source: Any, slot: Any) -> None:
        self.copy(source, self.memory.right.at[slot], slot, "down" if self.tile.down > 1 else None)

    def copy(self, source: Any, target: Any, slot: Any, axes: str | None) -> None:
        plgpu.copy_gmem_to_smem(source, target, self.barriers.here.at[slot], collective_axes=axes)

    def product(self, sums_ref: Any, worker: Any, steps: Any, n: Any) -> jax.Array:
        """A step's room is free when the next step's product has begun and its own has ended.

        Warpgroups share the room, so that of no more steps than it holds one can be ahead; shorter tiles have no lead.
        """
        lead, is_led = self.tile.lead, steps >= self.tile.stages
        if lead:
            pl.when(is_led & (worker == 1))(lambda: plgpu.barrier_wait(self.barriers.lead))

        def step(k: Any, _: Any) -> None:
            slot = self.slot(n + k)
            plgpu.barrier_wait(self.barriers.here.at[slot])
            self.multiply(sums_ref, worker, slot)
            if lead:
                pl.when(is_led & (worker == 0) & (k == lead))(lambda: plgpu.barrier_arrive(self.barriers.lead))
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
            plgpu.barrier_arrive(self.barriers.free.at[self.slot(n)])

    def slot(self, n: Any) -> Any:
        """Where step n finds what was loaded for it."""
        return jax.lax.rem(n, jnp.int32(self.tile.stages))

    def write_block(self, sums: jax.Array, worker: Any, out_ref: Any, column: Any) -> None:
        """To rows of the output that are all written."""
        short, (whole, _) = sums.astype(out_ref.dtype), self.memory.out
        for i, c in enumerate(range(0, self.tile.columns, WIDTH)):
            own = whole.at[worker, i % LEAVING]
            plgpu.wait_smem_to_gmem(LEAVING - 1, wait_read_only=True)
            own[...] = short[:, c : c + WIDTH]
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own, out_ref.at[:, pl.ds(column + c, WIDTH)])


def launch(
    kind: type[Program], how: How, tile: Tile, memory: Memory, out: jax.ShapeDtypeStruct, refs: Any
) -> jax.Array:
    """The kernel of a kind of program on what it reads."""
    programs = how.processors // tile.cluster
    cluster: dict[str, Any] = {}
    if tile.cluster > 1:
        cluster = {"cluster": (tile.down, tile.across), "cluster_names": AXES}

    def kernel(*arrays: Any) -> None:
        kind(tile, programs, *arrays).run()

    made: jax.Array = plgpu.kernel(
        kernel,
        out_type=out,
        scratch_types=(memory, Barriers.of(tile)),
        grid=(programs,),
        grid_names=("program",),
        **cluster,
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        kernel_name=kind.name,
    )(refs)
    return made
