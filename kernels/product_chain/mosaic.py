"""The products of a layer behind attention in one kernel, for Hopper GPUs, in Pallas for Mosaic: out with the residual,
norm, gate and up, down with the residual, and where asked the norm and the heads of the next layer.

A kernel for each of them leaves memory waiting while it begins and ends. Here every program streams its weights of all
of them through shared memory without a pause; only the rows between two products wait until all programs have written
them. One warpgroup loads weights, one loads rows, one multiplies. All programs must run at the same time, so that there
are no more of them than processors.

A norm is two factors: that of a column is multiplied where the column is made, that of a row, the inverse root of the
mean of its squares, behind the next product.

Shapes: M = 64 rows, A heads of attention, D residual stream, F hidden, Q heads of the next layer, P programs, S parts
of the inputs of `down`.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.fused_product.around import Activation, Norm
from maxhydra.kernels.product_chain.plan import BLOCK, ROWS, Plan, Share
from maxhydra.kernels.product_chain.weights import Weights

# Slots of weights and blocks of rows on their way at a time: what fits. A slot comes in so many copies.
SLOTS, BLOCKS, COPIES = 7, 9, 4
MATRIX = plgpu.Layout.WGMMA
COLUMN, ROW = MATRIX.reduce(1), MATRIX.reduce(0)
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def memory(*shape: int, dtype: Any) -> Any:
    """Shared memory for matrices, in the order in which the matrix unit and the copies want them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next((width for width in (128, 64, 32) if shape[-1] * size % width == 0), None)
    if swizzle is None:
        return plgpu.SMEM(shape, dtype)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Memory(NamedTuple):
    weights: Any
    rows: Any
    onto: Any
    scales: Any
    """Of the norms' columns of this program."""
    stream: Any
    scaled: Any
    squares: Any
    hidden: Any
    sums: Any
    heads: Any

    @classmethod
    def of(cls, plan: Plan, dtype: Any, scale: Any) -> "Memory":
        tile = partial(memory, ROWS, plan.out.outputs, dtype=dtype)
        return cls(
            weights=memory(SLOTS, plan.slot, BLOCK, dtype=dtype),
            rows=memory(BLOCKS, ROWS, BLOCK, dtype=dtype),
            onto=tile(),
            scales=[plgpu.SMEM((plan.out.outputs,), scale) for _ in range(plan.norms)],
            stream=tile(),
            scaled=tile(),
            squares=plgpu.SMEM((ROWS,), jnp.float32),
            hidden=memory(ROWS, plan.hidden.outputs // 2, dtype=dtype),
            sums=memory(ROWS, plan.down.outputs, dtype=jnp.float32),
            heads=None if plan.heads is None else memory(ROWS, plan.heads.outputs, dtype=dtype),
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    weights_here: Any
    rows_here: Any
    around_here: Any
    weights_free: Any
    rows_free: Any

    @classmethod
    def of(cls, plan: Plan) -> "Barriers":
        free: Any = plgpu.Barrier(num_barriers=BLOCKS)
        if plan.cluster > 1:
            free = plgpu.ClusterBarrier(collective_axes=("member",), num_barriers=BLOCKS)
        return cls(
            weights_here=plgpu.Barrier(num_arrivals=COPIES, num_barriers=SLOTS),
            rows_here=plgpu.Barrier(num_barriers=BLOCKS),
            around_here=plgpu.Barrier(num_arrivals=1 + plan.norms),
            weights_free=plgpu.Barrier(num_barriers=SLOTS),
            rows_free=free,
        )


class Written(NamedTuple):
    stream_MD: Any
    heads_MQ: Any
    scaled_MD: Any
    """For each norm the stream times its factors of columns."""
    squares_PM: Any
    """For each norm the sums of squares of each program's columns of the stream."""
    hidden_MF: Any
    sums_SMD: Any


class How(NamedTuple):
    """All but arrays."""

    plan: Plan
    activation: Activation
    offset: float
    eps: float


def chain(
    mixed_MA: jax.Array,
    onto_MD: jax.Array,
    weights: Weights,
    norms: tuple[Norm, ...],
    activation: Activation,
    *,
    plan: Plan,
) -> tuple[jax.Array, jax.Array | None]:
    """The stream [M, D] behind the layer, and the heads [M, Q] of the next where the weights have them; `norms` before
    the feed-forward and before the heads, alike but for their scales."""
    how = How(plan, activation, norms[0].offset, norms[0].eps)
    return _chain(how, mixed_MA, onto_MD, weights, tuple(norm.scale_K for norm in norms))


@partial(jax.jit, static_argnums=0)
def _chain(
    how: How, mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, scales: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array | None]:
    """Jitted, so that the layers of a model that are written out share one."""
    shape, plan, dtype = jax.ShapeDtypeStruct, how.plan, mixed_MA.dtype

    def kernel(mixed: Any, onto: Any, weights: Any, scales: Any, *rest: Any) -> None:
        *written, memory, barriers = rest
        _Program(how, mixed, onto, weights, scales, Written(*written), memory, barriers).run()

    stream = shape((ROWS, plan.D), dtype)
    written = Written(
        *plgpu.kernel(
            kernel,
            out_type=Written(
                stream_MD=stream,
                heads_MQ=None if plan.heads is None else shape((ROWS, plan.Q), dtype),
                scaled_MD=[stream] * plan.norms,
                squares_PM=[shape((plan.programs, ROWS), jnp.float32)] * plan.norms,
                hidden_MF=shape((ROWS, plan.F), dtype),
                sums_SMD=shape((plan.parts, ROWS, plan.D), jnp.float32),
            ),
            scratch_types=(Memory.of(plan, dtype, scales[0].dtype), Barriers.of(plan)),
            grid=(plan.programs // plan.cluster,),
            grid_names=("group",),
            cluster=(plan.cluster,),
            cluster_names=("member",),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=PARAMS,
            kernel_name="product_chain",
        )(mixed_MA, onto_MD, weights, scales)
    )
    return written.stream_MD, written.heads_MQ


class _Step(NamedTuple):
    """One product, and where its rows and weights come from."""

    share: Share
    weight_ref: Any
    starts: tuple[Any, ...]
    """First outputs of each copy of a block."""
    rows_ref: Any
    first: Any
    """Block of the inputs."""
    rows_before: int
    """Blocks of rows that came before, and slots of weights."""
    slots_before: int


@dataclasses.dataclass(frozen=True)
class _Program:
    how: How
    mixed_ref: Any
    onto_ref: Any
    weight_refs: Weights
    scale_refs: tuple[Any, ...]
    written: Written
    memory: Memory
    barriers: Barriers

    def run(self) -> None:
        plan, steps = self.how.plan, self.steps()
        worker, tiles = jax.lax.axis_index("warpgroup"), plan.programs // plan.parts
        done = pl.get_global(plgpu.SemaphoreType.REGULAR((3 + tiles,)))

        @pl.when(worker == 0)
        def _multiply() -> None:
            for slot in range(SLOTS):
                plgpu.barrier_arrive(self.barriers.weights_free.at[slot])
            for slot in range(BLOCKS):
                plgpu.barrier_arrive(self.barriers.rows_free.at[slot])
            self.add_out(steps[0])
            pl.semaphore_signal(done.at[0])
            self.gate(steps[1])
            pl.semaphore_signal(done.at[1])
            self.sum_down(steps[2])
            pl.semaphore_signal(done.at[3 + self.tile])
            own = 3 + jax.lax.div(self.program, jnp.int32(plan.parts))
            pl.semaphore_wait(done.at[own], plan.parts, decrement=False)
            self.add_down()
            if plan.heads is not None:
                pl.semaphore_signal(done.at[2])
                self.project(steps[3])

        @pl.when(worker == 1)
        def _load_weights() -> None:
            for step in steps:
                self.load_weights(step)
            for slot in range(SLOTS):
                plgpu.barrier_wait(self.barriers.weights_free.at[slot])

        @pl.when(worker == 2)
        def _load_rows() -> None:
            own, here = self.columns(plan.out.outputs), self.barriers.around_here
            plgpu.copy_gmem_to_smem(self.onto_ref.at[:, own], self.memory.onto, here)
            for scale_ref, scale in zip(self.scale_refs, self.memory.scales, strict=True):
                plgpu.copy_gmem_to_smem(scale_ref.at[own], scale, here)
            for number, step in enumerate(steps):
                if number > 0:
                    pl.semaphore_wait(done.at[number - 1], plan.programs, decrement=False)
                self.load_rows(step)
            for slot in range(BLOCKS):
                plgpu.barrier_wait(self.barriers.rows_free.at[slot])

    @property
    def group(self) -> Any:
        """Of programs that read the same rows."""
        return jax.lax.axis_index("group")

    @property
    def program(self) -> Any:
        return self.group * self.how.plan.cluster + jax.lax.axis_index("member")

    @property
    def part(self) -> Any:
        """Of the inputs of `down`."""
        return jax.lax.rem(self.group, jnp.int32(self.how.plan.parts))

    @property
    def tile(self) -> Any:
        """Of the outputs of `down`."""
        plan = self.how.plan
        return jax.lax.div(self.group, jnp.int32(plan.parts)) * plan.cluster + jax.lax.axis_index("member")

    def columns(self, width: int) -> Any:
        return pl.ds(self.program * width, width)

    def steps(self) -> list[_Step]:
        plan, program, written = self.how.plan, self.program, self.written
        gate = program * (plan.hidden.outputs // 2)
        sources: list[tuple[Share, Any, tuple[Any, ...], Any, Any]] = [
            (plan.out, self.weight_refs.out_DA, (program * plan.out.outputs,), self.mixed_ref, 0),
            (plan.hidden, self.weight_refs.gate_up_2FD, (gate, gate + plan.F), written.scaled_MD[0], 0),
            (plan.down, self.weight_refs.down_DF, (self.tile * plan.down.outputs,), written.hidden_MF, self.part),
        ]
        if plan.heads is not None:
            heads = (program * plan.heads.outputs,)
            sources.append((plan.heads, self.weight_refs.heads_QD, heads, written.scaled_MD[1], 0))
        steps, rows, slots = [], 0, 0
        for share, weight_ref, starts, rows_ref, part in sources:
            steps.append(_Step(share, weight_ref, starts, rows_ref, part * share.blocks, rows, slots))
            rows, slots = rows + share.blocks, slots + share.slots
        return steps

    def block(self, step: _Step, j: Any) -> Any:
        """Inputs of step j: groups begin at different ones, so that they do not all ask for the same memory."""
        return pl.ds((step.first + jax.lax.rem(j + self.group, jnp.int32(step.share.blocks))) * BLOCK, BLOCK)

    def load_rows(self, step: _Step) -> None:
        def load(j: Any, _: Any) -> None:
            slot, here = jax.lax.rem(step.rows_before + j, jnp.int32(BLOCKS)), self.barriers.rows_here
            plgpu.barrier_wait(self.barriers.rows_free.at[slot])
            source = step.rows_ref.at[:, self.block(step, j)]
            plgpu.copy_gmem_to_smem(source, self.memory.rows.at[slot], here.at[slot], collective_axes=shared)

        shared = "member" if self.how.plan.cluster > 1 else None
        jax.lax.fori_loop(0, step.share.blocks, load, None)

    def load_weights(self, step: _Step) -> None:
        share, here = step.share, self.barriers.weights_here
        copies = COPIES // share.in_slot
        height, each = share.outputs // copies, copies // len(step.starts)

        def load(j: Any, _: Any) -> None:
            slot = jax.lax.rem(step.slots_before + j, jnp.int32(SLOTS))
            plgpu.barrier_wait(self.barriers.weights_free.at[slot])
            for n in range(COPIES):
                block, copy = divmod(n, copies)
                start = step.starts[copy // each] + copy % each * height
                source = step.weight_ref.at[pl.ds(start, height), self.block(step, j * share.in_slot + block)]
                plgpu.copy_gmem_to_smem(source, self.memory.weights.at[slot, pl.ds(n * height, height)], here.at[slot])

        jax.lax.fori_loop(0, share.slots, load, None)

    def add_out(self, step: _Step) -> None:
        """The stream with what `out` adds to it."""
        sums = self.product(step)
        plgpu.barrier_wait(self.barriers.around_here)
        self.write_stream(sums + plgpu.layout_cast(self.memory.onto[...], MATRIX).astype(jnp.float32), norm=0)

    def add_down(self) -> None:
        """The same with the sum of `down`, of which other programs have the other parts."""
        plan, own = self.how.plan, self.columns(self.how.plan.out.outputs)
        sums = plgpu.layout_cast(self.memory.stream[...], MATRIX).astype(jnp.float32)
        for part in range(plan.parts):
            sums = sums + self.seen(self.written.sums_SMD.at[part, :, own])
        self.write_stream(sums, norm=1)

    def write_stream(self, wide: jax.Array, *, norm: int) -> None:
        """This program's columns of the stream, and what the norm of this number needs of them."""
        memory, written, own = self.memory, self.written, self.columns(self.how.plan.out.outputs)
        stream = wide.astype(memory.stream.dtype)
        memory.stream[...] = stream
        if norm == self.how.plan.norms:
            self.store(memory.stream, written.stream_MD.at[:, own])
            return
        wide = stream.astype(jnp.float32)
        factor = plgpu.layout_cast(memory.scales[norm][...], ROW).astype(jnp.float32) + self.how.offset
        memory.scaled[...] = (wide * jax.lax.broadcast_in_dim(factor, wide.shape, [1])).astype(memory.scaled.dtype)
        memory.squares[...] = jnp.sum(wide * wide, axis=1)
        plgpu.commit_smem()
        if norm == 1:
            plgpu.copy_smem_to_gmem(memory.stream, written.stream_MD.at[:, own])
        plgpu.copy_smem_to_gmem(memory.scaled, written.scaled_MD[norm].at[:, own])
        self.store(memory.squares, written.squares_PM[norm].at[self.program])

    def gate(self, step: _Step) -> None:
        factor, both, width = self.row_factor(step, 0), self.product(step, is_first_here=True), step.share.outputs // 2
        factor = jax.lax.broadcast_in_dim(factor, (ROWS, width), [0])
        gate, up = both[:, :width] * factor, both[:, width:] * factor
        self.memory.hidden[...] = (self.how.activation(gate) * up).astype(self.memory.hidden.dtype)
        self.store(self.memory.hidden, self.written.hidden_MF.at[:, self.columns(width)])

    def sum_down(self, step: _Step) -> None:
        self.memory.sums[...] = self.product(step)
        columns = pl.ds(step.starts[0], step.share.outputs)
        self.store(self.memory.sums, self.written.sums_SMD.at[self.part, :, columns])

    def project(self, step: _Step) -> None:
        """The next layer's heads."""
        factor, sums, width = self.row_factor(step, 1), self.product(step, is_first_here=True), step.share.outputs
        heads = sums * jax.lax.broadcast_in_dim(factor, (ROWS, width), [0])
        self.memory.heads[...] = heads.astype(self.memory.heads.dtype)
        self.store(self.memory.heads, self.written.heads_MQ.at[:, self.columns(width)])

    def row_factor(self, step: _Step, norm: int) -> jax.Array:
        """[M], when the first block of rows is here: then all programs have written their squares."""
        memory = self.memory
        plgpu.barrier_wait(self.barriers.rows_here.at[step.rows_before % BLOCKS])
        squares_PM = self.seen(self.written.squares_PM[norm])
        memory.squares[...] = jax.lax.rsqrt(jnp.sum(squares_PM, axis=0) / self.how.plan.D + self.how.eps)
        return plgpu.layout_cast(memory.squares[...], COLUMN)

    def seen(self, ref: Any) -> jax.Array:
        """What other programs have written to memory; so little that it need not come by a copy."""
        return plgpu.load(ref, (), layout=MATRIX, optimized=False)

    def store(self, source: Any, target: Any) -> None:
        """To memory, for other programs to see."""
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(source, target)
        plgpu.wait_smem_to_gmem(0)

    def product(self, step: _Step, *, is_first_here: bool = False) -> jax.Array:
        """Rows times weights as both come."""
        sums = plgpu.ACC((ROWS, step.share.outputs), jnp.float32)
        return pl.run_scoped(partial(self.stream, step=step, is_first_here=is_first_here), sums)

    def stream(self, sums_ref: Any, *, step: _Step, is_first_here: bool) -> jax.Array:
        """What a block was read from is free when the next product has begun."""
        memory, barriers, share = self.memory, self.barriers, step.share

        def rows(k: Any) -> Any:
            return jax.lax.rem(step.rows_before + k, jnp.int32(BLOCKS))

        def weights(j: Any) -> Any:
            return jax.lax.rem(step.slots_before + j, jnp.int32(SLOTS))

        def one(j: Any, _: Any, *, is_first: bool = False) -> None:
            plgpu.barrier_wait(barriers.weights_here.at[weights(j)])
            for n in range(share.in_slot):
                k = j * share.in_slot + n
                if not (is_first and n == 0 and is_first_here):
                    plgpu.barrier_wait(barriers.rows_here.at[rows(k)])
                weight = memory.weights.at[weights(j), pl.ds(n * share.outputs, share.outputs)]
                plgpu.wgmma(sums_ref, memory.rows.at[rows(k)], weight.transpose((1, 0)))
                plgpu.wgmma_wait(1)
                if not (is_first and n == 0):
                    plgpu.barrier_arrive(barriers.rows_free.at[rows(k - 1)])
                if n == 0 and not is_first:
                    plgpu.barrier_arrive(barriers.weights_free.at[weights(j - 1)])

        one(jnp.int32(0), None, is_first=True)
        jax.lax.fori_loop(1, share.slots, one, None)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.rows_free.at[rows(jnp.int32(share.blocks - 1))])
        plgpu.barrier_arrive(barriers.weights_free.at[weights(jnp.int32(share.slots - 1))])
        return sums_ref[...]
