"""The products of a layer behind attention in one kernel, for Hopper GPUs, in Pallas for Mosaic: out with the residual,
norm, gate and up, down.

A kernel for each of them leaves memory waiting while it begins and ends. Here every program streams its weights of all
three through shared memory without a pause; only the rows between two products wait until all programs have written
them. One warpgroup loads weights, one loads rows, one multiplies. All programs must run at the same time, so that there
are no more of them than processors.

The norm is two factors: that of a column is multiplied where the column is made, that of a row, the inverse root of the
mean of its squares, behind the next product.

Shapes: M = 64 rows, A heads of attention, D residual stream, F hidden, P programs, S sums of a part of the inputs each.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.fused_product.around import Activation, Norm
from maxhydra.kernels.product_chain.plan import BLOCK, PIECE, ROWS, Plan
from maxhydra.kernels.product_chain.weights import Weights

# Blocks of weights and of rows on their way at a time: what fits.
WEIGHTS, BLOCKS = 6, 4
MATRIX = plgpu.Layout.WGMMA
COLUMN, ROW = MATRIX.reduce(1), MATRIX.reduce(0)
PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def memory(*shape: int, dtype: Any) -> Any:
    """Shared memory for matrices, in the order in which the matrix unit and the copies want them."""
    size = jnp.dtype(dtype).itemsize
    swizzle = next(width for width in (128, 64, 32, 16) if shape[-1] * size % width == 0)
    transforms = (plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle))
    return plgpu.SMEM(shape, dtype, transforms=transforms)


class Memory(NamedTuple):
    out: Any
    weights: Any
    rows: Any
    onto: Any
    scale: Any
    stream: Any
    scaled: Any
    squares: Any
    hidden: Any
    sums: Any

    @classmethod
    def of(cls, plan: Plan, dtype: Any, scale: Any) -> "Memory":
        tile = partial(memory, ROWS, plan.of_out, dtype=dtype)
        return cls(
            out=memory(plan.A // PIECE, plan.of_out, PIECE, dtype=dtype),
            weights=memory(WEIGHTS, 2 * plan.of_hidden, BLOCK, dtype=dtype),
            rows=memory(BLOCKS, ROWS, BLOCK, dtype=dtype),
            onto=tile(),
            scale=plgpu.SMEM((plan.of_out,), scale),
            stream=tile(),
            scaled=tile(),
            squares=plgpu.SMEM((ROWS,), jnp.float32),
            hidden=memory(ROWS, plan.of_hidden, dtype=dtype),
            sums=memory(ROWS, plan.of_down, dtype=jnp.float32),
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    out_here: Any
    weights_here: Any
    rows_here: Any
    around_here: Any
    weights_free: Any
    rows_free: Any

    @classmethod
    def of(cls, plan: Plan) -> "Barriers":
        return cls(
            out_here=plgpu.Barrier(num_barriers=plan.A // PIECE),
            weights_here=plgpu.Barrier(num_arrivals=2, num_barriers=WEIGHTS),
            rows_here=plgpu.Barrier(num_barriers=BLOCKS),
            around_here=plgpu.Barrier(num_arrivals=2),
            weights_free=plgpu.Barrier(num_barriers=WEIGHTS),
            rows_free=plgpu.Barrier(num_barriers=BLOCKS),
        )


class Written(NamedTuple):
    stream_MD: Any
    scaled_MD: Any
    """The stream times the norm's factors of columns."""
    squares_PM: Any
    """Sums of squares of each program's columns of the stream."""
    hidden_MF: Any
    sums_SMD: Any


class How(NamedTuple):
    """All but arrays."""

    plan: Plan
    activation: Activation
    offset: float
    eps: float


def chain(
    mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, norm: Norm, activation: Activation, *, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """x = onto + out(mixed) [M, D], and [S, M, D] in float32 whose sum is the feed-forward of norm(x)."""
    how = How(plan, activation, norm.offset, norm.eps)
    return _chain(how, mixed_MA, onto_MD, weights, norm.scale_K)


@partial(jax.jit, static_argnums=0)
def _chain(
    how: How, mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, scale_D: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Jitted, so that the layers of a model that are written out share one."""
    shape, plan, dtype = jax.ShapeDtypeStruct, how.plan, mixed_MA.dtype

    def kernel(mixed: Any, onto: Any, weights: Any, scale: Any, *rest: Any) -> None:
        *written, memory, barriers = rest
        _Program(how, mixed, onto, weights, scale, Written(*written), memory, barriers).run()

    written = Written(
        *plgpu.kernel(
            kernel,
            out_type=Written(
                stream_MD=shape((ROWS, plan.D), dtype),
                scaled_MD=shape((ROWS, plan.D), dtype),
                squares_PM=shape((plan.programs, ROWS), jnp.float32),
                hidden_MF=shape((ROWS, plan.F), dtype),
                sums_SMD=shape((plan.parts, ROWS, plan.D), jnp.float32),
            ),
            scratch_types=(Memory.of(plan, dtype, scale_D.dtype), Barriers.of(plan)),
            grid=(plan.programs,),
            grid_names=("program",),
            num_threads=3,
            thread_name="warpgroup",
            compiler_params=PARAMS,
            kernel_name="product_chain",
        )(mixed_MA, onto_MD, weights, scale_D)
    )
    return written.stream_MD, written.sums_SMD


@dataclasses.dataclass(frozen=True)
class _Program:
    how: How
    mixed_ref: Any
    onto_ref: Any
    weight_refs: Weights
    scale_ref: Any
    written: Written
    memory: Memory
    barriers: Barriers

    def run(self) -> None:
        worker, done = jax.lax.axis_index("warpgroup"), pl.get_global(plgpu.SemaphoreType.REGULAR((2,)))

        @pl.when(worker == 0)
        def _multiply() -> None:
            for slot in range(WEIGHTS):
                plgpu.barrier_arrive(self.barriers.weights_free.at[slot])
            for slot in range(BLOCKS):
                plgpu.barrier_arrive(self.barriers.rows_free.at[slot])
            self.add_out()
            pl.semaphore_signal(done.at[0])
            self.gate()
            pl.semaphore_signal(done.at[1])
            self.sum_down()

        @pl.when(worker == 1)
        def _load_weights() -> None:
            self.load_weights()
            for slot in range(WEIGHTS):
                plgpu.barrier_wait(self.barriers.weights_free.at[slot])

        @pl.when(worker == 2)
        def _load_rows() -> None:
            self.load_rows(self.mixed_ref, self.plan.A // BLOCK, 0, 0)
            pl.semaphore_wait(done.at[0], self.plan.programs, decrement=False)
            self.load_rows(self.written.scaled_MD, self.plan.D // BLOCK, 0, self.plan.A // BLOCK)
            pl.semaphore_wait(done.at[1], self.plan.programs, decrement=False)
            before = (self.plan.A + self.plan.D) // BLOCK
            self.load_rows(self.written.hidden_MF, self.plan.down_blocks, self.part * self.plan.down_blocks, before)
            for slot in range(BLOCKS):
                plgpu.barrier_wait(self.barriers.rows_free.at[slot])

    @property
    def plan(self) -> Plan:
        return self.how.plan

    @property
    def program(self) -> Any:
        return jax.lax.axis_index("program")

    @property
    def part(self) -> Any:
        """Of the inputs of `down`."""
        return jax.lax.rem(self.program, jnp.int32(self.plan.parts))

    def columns(self, width: int) -> Any:
        return pl.ds(self.program * width, width)

    def turned(self, j: Any, blocks: int) -> Any:
        """The block of step j: programs begin at different ones, so that they do not all ask for the same memory."""
        return jax.lax.rem(j + self.program, jnp.int32(blocks))

    def load_rows(self, source_ref: Any, blocks: int, first: Any, before: int) -> None:
        """Blocks of rows, from the first on; `before`: blocks loaded earlier."""
        if before == 0:
            own = self.columns(self.plan.of_out)
            plgpu.copy_gmem_to_smem(self.onto_ref.at[:, own], self.memory.onto, self.barriers.around_here)
            plgpu.copy_gmem_to_smem(self.scale_ref.at[own], self.memory.scale, self.barriers.around_here)

        def step(j: Any, _: Any) -> None:
            slot = jax.lax.rem(before + j, jnp.int32(BLOCKS))
            across = pl.ds((first + self.turned(j, blocks)) * BLOCK, BLOCK)
            plgpu.barrier_wait(self.barriers.rows_free.at[slot])
            plgpu.copy_gmem_to_smem(
                source_ref.at[:, across], self.memory.rows.at[slot], self.barriers.rows_here.at[slot]
            )

        jax.lax.fori_loop(0, blocks, step, None)

    def load_weights(self) -> None:
        plan, refs, here = self.plan, self.weight_refs, self.barriers.weights_here
        own, half = self.columns(plan.of_out), plan.of_down // 2
        for piece in range(plan.A // PIECE):
            across = pl.ds(piece * PIECE, PIECE)
            plgpu.copy_gmem_to_smem(
                refs.out_DA.at[own, across], self.memory.out.at[piece], self.barriers.out_here.at[piece]
            )

        def load(slot: Any, ref: Any, starts: tuple[Any, Any], height: int, block: Any) -> None:
            plgpu.barrier_wait(self.barriers.weights_free.at[slot])
            for number, start in enumerate(starts):
                target = self.memory.weights.at[slot, pl.ds(number * height, height)]
                source = ref.at[pl.ds(start, height), pl.ds(block * BLOCK, BLOCK)]
                plgpu.copy_gmem_to_smem(source, target, here.at[slot])

        def of_hidden(j: Any, _: Any) -> None:
            start = self.program * plan.of_hidden
            block = self.turned(j, plan.D // BLOCK)
            slot = jax.lax.rem(j, jnp.int32(WEIGHTS))
            load(slot, refs.gate_up_2FD, (start, start + plan.F), plan.of_hidden, block)

        def of_down(j: Any, _: Any) -> None:
            start = jax.lax.div(self.program, jnp.int32(plan.parts)) * plan.of_down
            block = self.part * self.plan.down_blocks + self.turned(j, self.plan.down_blocks)
            slot = jax.lax.rem(plan.D // BLOCK + j, jnp.int32(WEIGHTS))
            load(slot, refs.down_DF, (start, start + half), half, block)

        jax.lax.fori_loop(0, plan.D // BLOCK, of_hidden, None)
        jax.lax.fori_loop(0, self.plan.down_blocks, of_down, None)

    def add_out(self) -> None:
        """The stream with what `out` adds to it, its scaled copy and its squares."""
        plan, memory, barriers, blocks = self.plan, self.memory, self.barriers, self.plan.A // BLOCK
        for piece in range(plan.A // PIECE):
            plgpu.barrier_wait(barriers.out_here.at[piece])

        def product(sums_ref: Any) -> jax.Array:
            def step(j: Any, _: Any) -> None:
                slot = jax.lax.rem(j, jnp.int32(BLOCKS))
                plgpu.barrier_wait(barriers.rows_here.at[slot])
                block, in_piece = self.turned(j, blocks), jnp.int32(PIECE // BLOCK)
                across = pl.ds(jax.lax.rem(block, in_piece) * BLOCK, BLOCK)
                weight = memory.out.at[jax.lax.div(block, in_piece), :, across]
                plgpu.wgmma(sums_ref, memory.rows.at[slot], weight.transpose((1, 0)))
                plgpu.wgmma_wait(0)
                plgpu.barrier_arrive(barriers.rows_free.at[slot])

            jax.lax.fori_loop(0, blocks, step, None)
            return sums_ref[...]

        sums = pl.run_scoped(product, plgpu.ACC((ROWS, plan.of_out), jnp.float32))
        plgpu.barrier_wait(barriers.around_here)
        onto = plgpu.layout_cast(memory.onto[...], MATRIX).astype(jnp.float32)
        stream = (sums + onto).astype(memory.stream.dtype)
        memory.stream[...] = stream
        wide = stream.astype(jnp.float32)
        factor = plgpu.layout_cast(memory.scale[...], ROW).astype(jnp.float32) + self.how.offset
        memory.scaled[...] = (wide * jax.lax.broadcast_in_dim(factor, wide.shape, [1])).astype(memory.scaled.dtype)
        memory.squares[...] = jnp.sum(wide * wide, axis=1)
        own, written = self.columns(plan.of_out), self.written
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.stream, written.stream_MD.at[:, own])
        plgpu.copy_smem_to_gmem(memory.scaled, written.scaled_MD.at[:, own])
        plgpu.copy_smem_to_gmem(memory.squares, written.squares_PM.at[self.program])
        plgpu.wait_smem_to_gmem(0)

    def gate(self) -> None:
        plan, memory, blocks = self.plan, self.memory, self.plan.D // BLOCK
        # When the first block is here, all programs have written their squares.
        plgpu.barrier_wait(self.barriers.rows_here.at[plan.A // BLOCK % BLOCKS])
        squares_PM = plgpu.load(self.written.squares_PM, layout=MATRIX, optimized=False)
        memory.squares[...] = jax.lax.rsqrt(jnp.sum(squares_PM, axis=0) / plan.D + self.how.eps)
        factor = jax.lax.broadcast_in_dim(plgpu.layout_cast(memory.squares[...], COLUMN), (ROWS, plan.of_hidden), [0])
        product = partial(self.streamed, blocks=blocks, before=(plan.A // BLOCK, 0), is_first_here=True)
        both = pl.run_scoped(product, plgpu.ACC((ROWS, 2 * plan.of_hidden), jnp.float32))
        gate, up = both[:, : plan.of_hidden] * factor, both[:, plan.of_hidden :] * factor
        memory.hidden[...] = (self.how.activation(gate) * up).astype(memory.hidden.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.hidden, self.written.hidden_MF.at[:, self.columns(plan.of_hidden)])
        plgpu.wait_smem_to_gmem(0)

    def sum_down(self) -> None:
        plan, memory = self.plan, self.memory
        before = ((plan.A + plan.D) // BLOCK, plan.D // BLOCK)
        product = partial(self.streamed, blocks=self.plan.down_blocks, before=before, is_first_here=False)
        memory.sums[...] = pl.run_scoped(product, plgpu.ACC((ROWS, plan.of_down), jnp.float32))
        plgpu.commit_smem()
        tile = jax.lax.div(self.program, jnp.int32(plan.parts))
        columns = pl.ds(tile * plan.of_down, plan.of_down)
        plgpu.copy_smem_to_gmem(memory.sums, self.written.sums_SMD.at[self.part, :, columns])
        plgpu.wait_smem_to_gmem(0)

    def streamed(self, sums_ref: Any, *, blocks: int, before: tuple[int, int], is_first_here: bool) -> jax.Array:
        """Rows times weights as both come, behind so many blocks of each; a block is free when the next is begun."""
        memory, barriers, outputs = self.memory, self.barriers, sums_ref.shape[1]

        def slots(j: Any) -> tuple[Any, Any]:
            return jax.lax.rem(before[0] + j, jnp.int32(BLOCKS)), jax.lax.rem(before[1] + j, jnp.int32(WEIGHTS))

        def free(j: Any) -> None:
            rows, weights = slots(j)
            plgpu.barrier_arrive(barriers.rows_free.at[rows])
            plgpu.barrier_arrive(barriers.weights_free.at[weights])

        def begin(j: Any, *, is_here: bool) -> None:
            rows, weights = slots(j)
            if not is_here:
                plgpu.barrier_wait(barriers.rows_here.at[rows])
            plgpu.barrier_wait(barriers.weights_here.at[weights])
            weight = memory.weights.at[weights, pl.ds(0, outputs)]
            plgpu.wgmma(sums_ref, memory.rows.at[rows], weight.transpose((1, 0)))

        def step(j: Any, _: Any) -> None:
            begin(j, is_here=False)
            plgpu.wgmma_wait(1)
            free(j - 1)

        begin(jnp.int32(0), is_here=is_first_here)
        jax.lax.fori_loop(1, blocks, step, None)
        plgpu.wgmma_wait(0)
        free(jnp.int32(blocks - 1))
        return sums_ref[...]
