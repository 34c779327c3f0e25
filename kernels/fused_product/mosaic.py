"""Gate, up and down of a few rows in one kernel, for Hopper GPUs, in Pallas for Mosaic.

A kernel for gate and up and one for down leave memory waiting while they begin and end. Here every program streams its
weights of both through shared memory without a pause: one warpgroup loads weights, one loads rows, one multiplies. A
group of programs makes a part of the hidden numbers and multiplies just these with `down`, so that only the rows wait,
and only until the group has written them. All programs must run at the same time.

Shapes: M rows, D residual stream, F hidden, G groups, which are parts of the inputs of `down`.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.fused_product.around import Activation
from maxhydra.kernels.fused_product.plan import ROWS, Plan
from maxhydra.kernels.mosaic import memory, slot_of

PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
# A block of weights comes in two copies: gates and values, or halves of the outputs.
COPIES = 2
# A group's count has a line of the cache to itself.
LINE = 64


class How(NamedTuple):
    """All but arrays."""

    plan: Plan
    activation: Activation


class Refs(NamedTuple):
    x_MD: Any
    gate_up_2FD: Any
    down_DF: Any
    counts: Any
    """Of each group, how many members have written what they hand over. Zeros before the kernel and after it."""
    hidden_MF: Any
    parts_GMD: Any


class Memory(NamedTuple):
    weights: Any
    rows: Any
    out: Any
    """Hidden numbers, and later sums."""

    @classmethod
    def of(cls, plan: Plan, dtype: Any) -> "Memory":
        return cls(
            weights=memory(plan.weights, plan.height, plan.inputs, dtype=dtype),
            rows=memory(plan.rows, ROWS, plan.inputs, dtype=dtype),
            out=plgpu.RefUnion(memory(ROWS, plan.hidden, dtype=dtype), memory(ROWS, plan.outputs, dtype=jnp.float32)),
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    weights_here: Any
    rows_here: Any
    weights_free: Any
    rows_free: Any
    """In all programs of a cluster."""

    @classmethod
    def of(cls, plan: Plan) -> "Barriers":
        free: Any = plgpu.Barrier(num_barriers=plan.rows)
        if plan.cluster > 1:
            free = plgpu.ClusterBarrier(collective_axes=("member",), num_barriers=plan.rows)
        return cls(
            weights_here=plgpu.Barrier(num_arrivals=COPIES, num_barriers=plan.weights),
            rows_here=plgpu.Barrier(num_barriers=plan.rows),
            weights_free=plgpu.Barrier(num_barriers=plan.weights),
            rows_free=free,
        )


@partial(jax.jit, static_argnums=0)
def parts(how: How, x_MD: jax.Array, gate_up_2FD: jax.Array, down_DF: jax.Array) -> jax.Array:
    """[G, M, D] in float32 whose sum is down(activation(gate(x)) * up(x)). Jitted, so that the layers of a model that
    are written out share one."""
    plan, shape = how.plan, jax.ShapeDtypeStruct
    # Pallas would fill semaphores of its own with zeros for every layer. It takes this for such, of four bytes each.
    counts = jnp.zeros((plan.groups, LINE), jnp.int16)

    def kernel(*refs: Any) -> None:
        *arrays, memory, barriers = refs
        _Program(how, Refs(*arrays), memory, barriers).run()

    _, parts_GMD = plgpu.kernel(
        kernel,
        out_type=(shape((plan.M, plan.F), x_MD.dtype), shape((plan.groups, plan.M, plan.D), jnp.float32)),
        scratch_types=(Memory.of(plan, x_MD.dtype), Barriers.of(plan)),
        grid=(plan.programs // plan.cluster,),
        grid_names=("cluster",),
        cluster=(plan.cluster,),
        cluster_names=("member",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        kernel_name="feed_forward",
    )(x_MD, gate_up_2FD, down_DF, counts)
    return parts_GMD


class _Step(NamedTuple):
    """One product, and where its rows and weights come from."""

    rows_ref: Any
    weight_ref: Any
    starts: tuple[Any, Any]
    """First outputs of each copy of a block."""
    height: int
    """Outputs."""
    first: Any
    """Block of the inputs."""
    blocks: int
    before: int
    """Blocks of the steps before."""


@dataclasses.dataclass(frozen=True)
class _Program:
    how: How
    refs: Refs
    memory: Memory
    barriers: Barriers

    def run(self) -> None:
        (hidden, down), worker, members = self.steps(), jax.lax.axis_index("warpgroup"), self.plan.members
        count = self.refs.counts.at[self.group, 0]

        @pl.when(worker == 0)
        def _multiply() -> None:
            self.write_hidden(hidden)
            plgpu.semaphore_signal(count, memory_scope="gpu")
            self.write_sums(down)

        @pl.when(worker == 1)
        def _load_weights() -> None:
            self.load_weights(hidden)
            self.load_weights(down)

        @pl.when(worker == 2)
        def _load_rows() -> None:
            self.load_rows(hidden)
            plgpu.semaphore_wait(count, members, decrement=False, memory_scope="gpu")
            # The last member to come by makes it zero again, since 32 bits have no more.
            plgpu.semaphore_signal(count, 2**32 // members - 1, memory_scope="gpu")
            self.load_rows(down)
            self.wait_for_cluster()

    @property
    def plan(self) -> Plan:
        return self.how.plan

    @property
    def program(self) -> Any:
        return jax.lax.axis_index("cluster") * self.plan.cluster + jax.lax.axis_index("member")

    @property
    def group(self) -> Any:
        return jax.lax.div(self.program, jnp.int32(self.plan.members))

    def steps(self) -> tuple[_Step, _Step]:
        plan, refs = self.plan, self.refs
        gate, blocks = self.program * plan.hidden, plan.D // plan.inputs
        hidden = _Step(refs.x_MD, refs.gate_up_2FD, (gate, gate + plan.F), 2 * plan.hidden, 0, blocks, 0)
        out = jax.lax.rem(self.program, jnp.int32(plan.members)) * plan.outputs
        starts, of_part = (out, out + plan.outputs // COPIES), plan.F // plan.groups // plan.inputs
        down = _Step(refs.hidden_MF, refs.down_DF, starts, plan.outputs, self.group * of_part, of_part, blocks)
        return hidden, down

    def load_weights(self, step: _Step) -> None:
        def load(across: Any, slot: Any) -> None:
            height, here = step.height // COPIES, self.barriers.weights_here.at[slot]
            for copy, start in enumerate(step.starts):
                place = self.memory.weights.at[slot, pl.ds(copy * height, height)]
                plgpu.copy_gmem_to_smem(step.weight_ref.at[pl.ds(start, height), across], place, here)

        self.load(step, self.plan.weights, self.barriers.weights_free, load)

    def load_rows(self, step: _Step) -> None:
        """Each program of a cluster brings a part of what all get."""
        shared = "member" if self.plan.cluster > 1 else None

        def load(across: Any, slot: Any) -> None:
            place, here = self.memory.rows.at[slot, pl.ds(0, self.plan.M)], self.barriers.rows_here.at[slot]
            plgpu.copy_gmem_to_smem(step.rows_ref.at[:, across], place, here, collective_axes=shared)

        self.load(step, self.plan.rows, self.barriers.rows_free, load)

    def load(self, step: _Step, slots: int, free: Any, one: Callable[[Any, Any], None]) -> None:
        """The blocks of a step, as soon as there is room; there is at the beginning."""

        def load(k: Any, slot: Any) -> None:
            one(pl.ds((step.first + k) * self.plan.inputs, self.plan.inputs), slot)

        def load_later(k: Any, _: Any) -> None:
            slot = slot_of(step.before + k, slots)
            plgpu.barrier_wait(free.at[slot])
            load(k, slot)

        at_once = max(0, min(slots - step.before, step.blocks))
        for k in range(at_once):
            load(k, step.before + k)
        jax.lax.fori_loop(at_once, step.blocks, load_later, None)

    def wait_for_cluster(self) -> None:
        """Until nobody tells this program of room any more."""
        if self.plan.cluster > 1:
            for slot in range(self.plan.rows):
                plgpu.barrier_wait(self.barriers.rows_free.at[slot])

    def write_hidden(self, step: _Step) -> None:
        sums, width, (hidden, _) = self.product(step), self.plan.hidden, self.memory.out
        hidden[...] = (self.how.activation(sums[:, :width]) * sums[:, width:]).astype(hidden.dtype)
        self.store(hidden, self.refs.hidden_MF.at[:, pl.ds(step.starts[0], width)])
        plgpu.wait_smem_to_gmem(0)

    def write_sums(self, step: _Step) -> None:
        _, out = self.memory.out
        out[...] = self.product(step)
        self.store(out, self.refs.parts_GMD.at[self.group, :, pl.ds(step.starts[0], step.height)])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def store(self, source: Any, target: Any) -> None:
        """The rows that there are."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, self.plan.M)], target)

    def product(self, step: _Step) -> jax.Array:
        return pl.run_scoped(partial(self.stream, step=step), plgpu.ACC((ROWS, step.height), jnp.float32))

    def stream(self, sums_ref: Any, *, step: _Step) -> jax.Array:
        """Rows times weights as both come. What a block was read from is free when the product of the next has begun.
        Rows beyond M are whatever lies there, and make sums that nobody reads."""
        memory, barriers, plan = self.memory, self.barriers, self.plan

        def begin(k: Any) -> None:
            row, slot = slot_of(step.before + k, plan.rows), slot_of(step.before + k, plan.weights)
            plgpu.barrier_wait(barriers.rows_here.at[row])
            plgpu.barrier_wait(barriers.weights_here.at[slot])
            weight = memory.weights.at[slot, pl.ds(0, step.height)]
            plgpu.wgmma(sums_ref, memory.rows.at[row], weight.transpose((1, 0)))

        def free(k: Any) -> None:
            plgpu.barrier_arrive(barriers.rows_free.at[slot_of(step.before + k, plan.rows)])
            plgpu.barrier_arrive(barriers.weights_free.at[slot_of(step.before + k, plan.weights)])

        def both(k: Any, _: Any) -> None:
            begin(k)
            plgpu.wgmma_wait(1)
            free(k - 1)

        begin(jnp.int32(0))
        jax.lax.fori_loop(1, step.blocks, both, None)
        plgpu.wgmma_wait(0)
        free(jnp.int32(step.blocks - 1))
        return sums_ref[...]
