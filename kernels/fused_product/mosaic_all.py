"""Gate, up and down of a few rows in one kernel, for Hopper GPUs, in Pallas for Mosaic.

A kernel for gate and up and one for down leave memory waiting while they begin and end. Here every program streams its
weights of both through one ring in shared memory without a pause: one warpgroup loads weights, one loads rows, one
multiplies. A group of programs makes a part of the hidden numbers and multiplies just these with `down`, so that only
the rows wait, and only until the group has written them. All programs must run at the same time.

Shapes: M rows, D residual stream, F hidden, G groups, which are parts of the inputs of `down`.
"""

import dataclasses
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
# A group's counter has a line of the cache to itself.
LINE = 64
# Numbers of a row that a copy takes at most.
COPIED = 256
STRIDED = plgpu.Layout.WG_STRIDED


class How(NamedTuple):
    """All but arrays."""

    plan: Plan
    activation: Activation
    offset: float
    """Of the norm, and its epsilon."""
    eps: float


class Refs(NamedTuple):
    mixed_MA: Any
    out_DA: Any
    onto_MD: Any
    scale_D: Any
    gate_up_2FD: Any
    down_DF: Any
    then_scale_D: Any
    then_ND: Any
    counts: Any
    """Of programs that have written what others wait for. Zeros before the kernel and after it."""
    parts_PMD: Any
    """Whose sum is added to the stream before."""
    stream_MD: Any
    x_MD: Any
    """The norm of the stream."""
    hidden_MF: Any
    parts_GMD: Any
    then_stream_MD: Any
    then_x_MD: Any
    parts_TMN: Any


class Count(NamedTuple):
    """Some programs tell others of something. The last of those to hear of it makes the count zero again, since 32 bits
    have no more."""

    ref: Any
    tellers: int
    hearers: int

    def tell(self) -> None:
        plgpu.semaphore_signal(self.ref, self.hearers, memory_scope="gpu")

    def hear(self) -> None:
        plgpu.semaphore_wait(self.ref, self.tellers * self.hearers, decrement=False, memory_scope="gpu")
        plgpu.semaphore_signal(self.ref, 2**32 // self.hearers - self.tellers, memory_scope="gpu")


class Memory(NamedTuple):
    weights: Any
    rows: Any
    out: Any
    """A row of the stream and its norm, then hidden numbers, then sums."""

    @classmethod
    def of(cls, plan: Plan, N: int, dtype: Any) -> "Memory":
        return cls(
            weights=memory(plan.slots, plan.height, plan.inputs, dtype=dtype),
            rows=memory(plan.slots, ROWS, plan.inputs, dtype=dtype),
            out=plgpu.RefUnion(
                plgpu.SMEM((2, plan.D), dtype),
                memory(ROWS, plan.D * plan.out_parts // plan.programs, dtype=jnp.float32),
                memory(ROWS, plan.hidden, dtype=dtype),
                memory(ROWS, plan.outputs, dtype=jnp.float32),
                memory(ROWS, N * plan.then_parts // plan.programs, dtype=jnp.float32),
            ),
        )


class Barriers(NamedTuple):
    """Of what has arrived in the ring, and of what may be written over."""

    here: Any
    free: Any

    @classmethod
    def of(cls, plan: Plan) -> "Barriers":
        free: Any = plgpu.Barrier(num_barriers=plan.slots)
        if plan.cluster > 1:
            free = plgpu.ClusterBarrier(collective_axes=("member",), num_barriers=plan.slots)
        return cls(plgpu.Barrier(num_arrivals=COPIES + 1, num_barriers=plan.slots), free)


@partial(jax.jit, static_argnums=0)
def feed_forward(
    how: How,
    mixed_MA: jax.Array,
    out_DA: jax.Array,
    onto_MD: jax.Array,
    scale_D: jax.Array,
    gate_up_2FD: jax.Array,
    down_DF: jax.Array,
    then_scale_D: jax.Array,
    then_ND: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """x = onto + the sum of parts [M, D], and [G, M, D] in float32 whose sum is the feed-forward of norm(x). Jitted, so
    that the layers of a model that are written out share one."""
    plan, dtype, shape = how.plan, onto_MD.dtype, jax.ShapeDtypeStruct
    # The one way to an array of counters: Pallas takes these for semaphores, which have four bytes.
    counts = jnp.zeros((plan.groups * plan.waits + 4, LINE), jnp.int16)

    def kernel(*refs: Any) -> None:
        *given, memory, barriers = refs
        _Program(how, Refs(*given), memory, barriers).run()

    *_, stream_MD, _, parts_TMN = plgpu.kernel(
        kernel,
        out_type=(
            shape((plan.out_parts, plan.M, plan.D), jnp.float32),
            shape((plan.M, plan.D), dtype),
            shape((plan.M, plan.D), dtype),
            shape((plan.M, plan.F), dtype),
            shape((plan.groups, plan.M, plan.D), jnp.float32),
            shape((plan.M, plan.D), dtype),
            shape((plan.M, plan.D), dtype),
            shape((plan.then_parts, plan.M, then_ND.shape[0]), jnp.float32),
        ),
        scratch_types=(Memory.of(plan, then_ND.shape[0], dtype), Barriers.of(plan)),
        grid=(plan.programs // plan.cluster,),
        grid_names=("cluster",),
        cluster=(plan.cluster,),
        cluster_names=("member",),
        num_threads=3,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        kernel_name="feed_forward",
    )(mixed_MA, out_DA, onto_MD, scale_D, gate_up_2FD, down_DF, then_scale_D, then_ND, counts)
    return stream_MD, parts_TMN


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
    turn: Any
    """Blocks after that from which on the program takes them: members begin at different ones, so that they do not all
    ask for the same rows."""
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
        steps, worker, plan = self.steps(), jax.lax.axis_index("warpgroup"), self.plan

        @pl.when(worker == 0)
        def _multiply() -> None:
            refs = self.refs
            self.write_sums(steps[0], refs.parts_PMD.at[self.part(plan.out_parts)], self.memory.out[1])
            self.add_up(refs.parts_PMD, refs.onto_MD, refs.scale_D, refs.stream_MD, refs.x_MD, 0)
            self.write_hidden(steps[1])
            self.hidden_there(self.place_of_wait).tell()
            self.write_sums(steps[2], refs.parts_GMD.at[self.group], self.memory.out[3])
            self.add_up(refs.parts_GMD, refs.stream_MD, refs.then_scale_D, refs.then_stream_MD, refs.then_x_MD, 2)
            self.write_sums(steps[3], refs.parts_TMN.at[self.part(plan.then_parts)], self.memory.out[4])

        @pl.when(worker == 1)
        def _load_weights() -> None:
            for step in steps:
                self.load(step, self.load_weights)
            self.wait_for_cluster()

        @pl.when(worker == 2)
        def _load_rows() -> None:
            self.load(steps[0], self.load_rows)
            self.rows_there(1).hear()
            self.load(steps[1], self.load_rows)
            size = steps[2].blocks // plan.waits
            for n in range(plan.waits):
                self.hidden_there(jax.lax.rem(self.place_of_wait + n, jnp.int32(plan.waits))).hear()
                self.load(steps[2], self.load_rows, n * size, (n + 1) * size)
            self.rows_there(3).hear()
            self.load(steps[3], self.load_rows)

    @property
    def place_of_wait(self) -> Any:
        return jax.lax.div(self.place, jnp.int32(self.plan.members // self.plan.waits))

    def rows_there(self, n: int) -> Count:
        return Count(self.refs.counts.at[n, 0], self.plan.M, self.plan.programs)

    def parts_there(self, n: int) -> Count:
        return Count(self.refs.counts.at[n, 0], self.plan.programs, self.plan.programs)

    def part(self, parts: int) -> Any:
        return jax.lax.rem(self.program, jnp.int32(parts))

    def step(self, rows_ref, weight_ref, parts, before):
        (N, K), plan = weight_ref.shape, self.plan
        height, count = N * parts // plan.programs, K // parts // plan.inputs
        start = jax.lax.div(self.program, jnp.int32(parts)) * height
        return _Step(rows_ref, weight_ref, (start, start + height // 2), height, self.part(parts) * count, 0, count, before)

    def hidden_there(self, wait: Any) -> Count:
        plan = self.plan
        ref = self.refs.counts.at[4 + self.group * plan.waits + wait, 0]
        return Count(ref, plan.members // plan.waits, plan.members)

    @property
    def plan(self) -> Plan:
        return self.how.plan

    @property
    def program(self) -> Any:
        return jax.lax.axis_index("cluster") * self.plan.cluster + jax.lax.axis_index("member")

    @property
    def group(self) -> Any:
        return jax.lax.div(self.program, jnp.int32(self.plan.members))

    @property
    def place(self) -> Any:
        """In the group."""
        return jax.lax.rem(self.program, jnp.int32(self.plan.members))

    def steps(self) -> tuple[_Step, _Step, _Step]:
        plan, refs = self.plan, self.refs
        gate, out, blocks = self.program * plan.hidden, self.place * plan.outputs, plan.D // plan.inputs
        turn = jax.lax.div(self.place, jnp.int32(plan.cluster)) if plan.is_turned else 0
        out_step = self.step(refs.mixed_MA, refs.out_DA, plan.out_parts, 0)
        count = out_step.blocks
        hidden = _Step(refs.x_MD, refs.gate_up_2FD, (gate, gate + plan.F), 2 * plan.hidden, 0, turn, blocks, count)
        of_part, half = plan.F // plan.groups // plan.inputs, plan.outputs // COPIES
        first = self.group * of_part
        turn = turn if plan.waits == 1 else self.place_of_wait * (of_part // plan.waits)
        down = _Step(refs.hidden_MF, refs.down_DF, (out, out + half), plan.outputs, first, turn, of_part, count + blocks)
        then = self.step(refs.then_x_MD, refs.then_ND, plan.then_parts, count + blocks + of_part)
        return out_step, hidden, down, then

    def inputs(self, step: _Step, k: Any) -> Any:
        """Of the program's block k."""
        block = step.first + jax.lax.rem(k + step.turn, jnp.int32(step.blocks))
        return pl.ds(block * self.plan.inputs, self.plan.inputs)

    def load(self, step: _Step, one: Any, first: int = 0, end: int | None = None) -> None:
        """Blocks of a step, as soon as there is room; there is at the beginning."""
        slots, end = self.plan.slots, step.blocks if end is None else end
        full = max(first, min(slots - step.before, end))
        for k in range(first, full):
            one(step, jnp.int32(k), (step.before + k) % slots)

        def load(k: Any, _: Any) -> None:
            slot = slot_of(step.before + k, slots)
            plgpu.barrier_wait(self.barriers.free.at[slot])
            one(step, k, slot)

        jax.lax.fori_loop(full, end, load, None)

    def load_weights(self, step: _Step, k: Any, slot: Any) -> None:
        across, height = self.inputs(step, k), step.height // COPIES
        for copy, start in enumerate(step.starts):
            place = self.memory.weights.at[slot, pl.ds(copy * height, height)]
            plgpu.copy_gmem_to_smem(
                step.weight_ref.at[pl.ds(start, height), across], place, self.barriers.here.at[slot]
            )

    def load_rows(self, step: _Step, k: Any, slot: Any) -> None:
        place = self.memory.rows.at[slot, pl.ds(0, self.plan.M)]
        shared = "member" if self.plan.cluster > 1 else None
        source = step.rows_ref.at[:, self.inputs(step, k)]
        plgpu.copy_gmem_to_smem(source, place, self.barriers.here.at[slot], collective_axes=shared)

    def wait_for_cluster(self) -> None:
        """Until nobody tells this program anything any more."""
        if self.plan.cluster > 1:
            for slot in range(self.plan.slots):
                plgpu.barrier_wait(self.barriers.free.at[slot])

    def add_up(self, parts_ref, onto_ref, scale_ref, stream_ref, x_ref, n) -> None:
        self.parts_there(n).tell()
        self.parts_there(n).hear()

        @pl.when(self.program < self.plan.M)
        def _row():
            self.write_normed(parts_ref, onto_ref, scale_ref, stream_ref, x_ref)
            self.rows_there(n + 1).tell()

    def write_normed(self, parts_ref, onto_ref, scale_ref, stream_ref, x_ref) -> None:
        """One row of the stream, and its norm."""
        plan, row, (both, *_) = self.plan, self.program, self.memory.out
        parts, read = parts_ref.shape[0], partial(plgpu.load, layout=STRIDED((plan.D,), vec_size=4), optimized=False)
        wide = sum((read(parts_ref, (part, row)) for part in range(1, parts)), read(parts_ref, (0, row)))
        stream = (wide + read(onto_ref, (row,)).astype(jnp.float32)).astype(both.dtype)
        both[0] = stream
        wide = stream.astype(jnp.float32)
        factor = jax.lax.rsqrt(jnp.sum(wide * wide) / plan.D + self.how.eps)
        scale = read(scale_ref, ()).astype(jnp.float32) + self.how.offset
        both[1] = (wide * factor * scale).astype(both.dtype)
        plgpu.commit_smem()
        for start in range(0, plan.D, min(COPIED, plan.D)):
            some = pl.ds(start, min(COPIED, plan.D))
            plgpu.copy_smem_to_gmem(both.at[0, some], stream_ref.at[row, some])
            plgpu.copy_smem_to_gmem(both.at[1, some], x_ref.at[row, some])
        plgpu.wait_smem_to_gmem(0)

    def write_hidden(self, step: _Step) -> None:
        sums, width, (_, _, hidden, _, _) = self.product(step), self.plan.hidden, self.memory.out
        hidden[...] = (self.how.activation(sums[:, :width]) * sums[:, width:]).astype(hidden.dtype)
        self.store(hidden, self.refs.hidden_MF.at[:, pl.ds(step.starts[0], width)])

    def write_sums(self, step: _Step, target: Any, out: Any) -> None:
        out[...] = self.product(step)
        self.store(out, target.at[:, pl.ds(step.starts[0], step.height)])

    def store(self, source: Any, target: Any) -> None:
        """Of the rows that there are, for other programs to see."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source.at[pl.ds(0, self.plan.M)] if self.plan.M < ROWS else source, target)
        plgpu.wait_smem_to_gmem(0)

    def product(self, step: _Step) -> jax.Array:
        return pl.run_scoped(partial(self.stream, step=step), plgpu.ACC((ROWS, step.height), jnp.float32))

    def stream(self, sums_ref: Any, *, step: _Step) -> jax.Array:
        """Rows times weights as both come. What a block was read from is free when the product of the next has begun.
        Rows beyond M are whatever lies there, and make sums that nobody reads."""
        memory, barriers, slots = self.memory, self.barriers, self.plan.slots

        def begin(k: Any) -> None:
            slot = slot_of(step.before + k, slots)
            plgpu.barrier_wait(barriers.here.at[slot])
            weight = memory.weights.at[slot, pl.ds(0, step.height)]
            plgpu.wgmma(sums_ref, memory.rows.at[slot], weight.transpose((1, 0)))

        def free(k: Any) -> None:
            plgpu.barrier_arrive(barriers.free.at[slot_of(step.before + k, slots)])

        def both(k: Any, _: Any) -> None:
            begin(k)
            plgpu.wgmma_wait(1)
            free(k - 1)

        begin(jnp.int32(0))
        jax.lax.fori_loop(1, step.blocks, both, None)
        plgpu.wgmma_wait(0)
        free(jnp.int32(step.blocks - 1))
        return sums_ref[...]
