"""The backward kernel: a program has 128 keys, 64 to each of two warpgroups, and goes over all queries that see them.

Everything is turned, keys by queries, so that the weights and their gradients are left operands, which may come from
registers; the gradients of keys and values stay there too. The gradients of the logits also go through shared memory,
where both warpgroups find those of all 128 keys, and make a half each of what these add to the gradient of the queries.
It is summed in float32 in the order in which programs come to it, so two runs differ by rounding.

Where registers allow, the product of the next step's logits is begun behind those of this one's gradients, so that the
matrix unit has work while the loop turns. Each warpgroup then has code of its own: with its number known, places in
shared memory are constants, where they would take registers that the sums need.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows, query_ranges
from maxhydra.kernels.attention.mosaic.how import How, Tile
from maxhydra.kernels.attention.mosaic.parts import (
    COLUMN,
    PARAMS,
    ROW,
    ROWS,
    WORKERS,
    across,
    hidden_as,
    logits,
    meetings,
    narrowed,
    over,
    slot_of,
)
from maxhydra.kernels.attention.mosaic.room import BUFFERS, KEYS, Barriers, Memory, Sizes


@partial(jax.jit, static_argnums=(0, 1))
def backward(how: How, tile: Tile, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values."""
    (B, S, K, H), dtype = inputs.k_BSKH.shape, inputs.k_BSKH.dtype
    sizes, is_tagged = Sizes.of(inputs, tile), inputs.q_segments_BT is not None
    scratch = Memory.of(sizes, dtype, is_tagged=is_tagged), Barriers.of(sizes, is_tagged=is_tagged)

    def kernel(*arrays: Any) -> None:
        def run(*scratch: Any) -> None:
            _Program(how, sizes, *arrays, *scratch).run()

        pl.run_scoped(run, *scratch, collective_axes="warpgroup")

    met = None
    if is_tagged:
        met = meetings(inputs.kv_segments_BS, inputs.q_segments_BT, rows=KEYS, columns=sizes.C)
    of_keys = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    d_q_ref = jax.new_ref(_zeros_once_there(rows, inputs.q_BTNH.shape))
    d_k_BSKH, d_v_BSKH = pl.kernel(
        kernel,
        out_type=(of_keys, of_keys),
        mesh=plgpu.Mesh(
            grid=(B, K, S // KEYS),
            grid_names=("b", "k", "block"),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=PARAMS,
        name="attention_backward",
    )(inputs, rows, met, d_q_ref)
    d_q_BTNH = (d_q_ref[...] * how.request.scale).astype(dtype)
    return d_q_BTNH, d_k_BSKH, d_v_BSKH


def _zeros_once_there(rows: Rows, shape: tuple[int, ...]) -> jax.Array:
    """Float32 zeros, made when the rows are there: else the compiler makes those of all layers at once, at the start of
    the backward pass, which then holds them all."""
    zero, _ = jax.lax.optimization_barrier((jnp.zeros((), jnp.float32), rows))
    return jnp.broadcast_to(zero, shape)


@dataclasses.dataclass(frozen=True)
class _Program:
    how: How
    sizes: Sizes
    refs: Inputs
    rows: Rows
    meetings_ref: Any
    d_q_ref: Any
    d_k_ref: Any
    d_v_ref: Any
    memory: Memory
    barriers: Barriers

    @property
    def is_tagged(self) -> bool:
        return self.refs.q_segments_BT is not None

    @property
    def place(self) -> tuple[Any, Any, Any]:
        """Sequence, head and first key."""
        b, k, block = (jax.lax.axis_index(name) for name in ("b", "k", "block"))
        return b, k, block * KEYS

    def run(self) -> None:
        worker, request = jax.lax.axis_index("warpgroup"), self.how.request
        (b, _, start), T, C = self.place, self.sizes.T, self.sizes.C
        ranges = query_ranges(request, start, C=C, D=KEYS, T=T, is_tagged=self.is_tagged)
        if self.is_tagged:
            ranges = narrowed(ranges, self.meetings_ref, b, jax.lax.div(start, jnp.int32(KEYS)))

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            self.load_keys()
            self.load_queries(ranges)

        if not self.sizes.is_ahead:
            pl.when(worker < WORKERS)(partial(self.compute, worker, ranges))
            return
        for known in range(WORKERS):
            pl.when(worker == known)(partial(self.compute, known, ranges))

    def compute(self, worker: Any, ranges: Ranges) -> None:
        plgpu.set_max_registers(240, action="increase")
        _Worker(self, worker).run(ranges)

    def load_keys(self) -> None:
        (b, k, start), refs, memory, columns = self.place, self.refs, self.memory, self.sizes.columns
        for worker in range(WORKERS):
            here, keys = self.barriers.kv_here.at[worker], pl.ds(start + worker * ROWS, ROWS)
            for part in range(self.sizes.parts):
                some = pl.ds(part * columns, columns)
                plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, k, some], memory.k.at[worker, part], here)
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, k], memory.v.at[worker], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[worker], here)

    def load_queries(self, ranges: Ranges) -> None:
        (b, k, _), rows, memory, barriers = self.place, self.rows, self.memory, self.barriers
        C, G, stages = self.sizes.C, self.sizes.G, self.sizes.stages

        def step(i: Any, n: Any, *, head: Any) -> Any:
            self.load_query(i, n, head)
            slot, queries = slot_of(n, stages), pl.ds(i * C, C)
            here = barriers.d_out_here.at[slot]
            plgpu.barrier_wait(barriers.d_out_free.at[slot])
            plgpu.copy_gmem_to_smem(rows.d_out_BTNH.at[b, queries, head], memory.d_out.at[slot], here)
            plgpu.copy_gmem_to_smem(rows.mean_BNT.at[b, head, queries], memory.mean.at[slot], here)
            return n + 1

        def of_head(g: Any, n: Any) -> Any:
            return jax.lax.fori_loop(ranges.first, ranges.last, partial(step, head=k * G + g), n)

        steps = jax.lax.fori_loop(0, G, of_head, jnp.int32(0))
        if self.sizes.is_ahead:
            # For the product that the last step begins, which nobody uses.
            self.load_query(0, steps, k * G)

    def load_query(self, i: Any, n: Any, head: Any) -> None:
        b, refs, memory, barriers = self.place[0], self.refs, self.memory, self.barriers
        slot, queries = slot_of(n, self.sizes.stages), pl.ds(i * self.sizes.C, self.sizes.C)
        here = barriers.q_here.at[slot]
        plgpu.barrier_wait(barriers.q_free.at[slot])
        plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, head], memory.q.at[slot], here)
        plgpu.copy_gmem_to_smem(self.rows.total_BNT.at[b, head, queries], memory.total.at[slot], here)
        if self.is_tagged:
            plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[slot], here)


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A warpgroup with its keys."""

    program: _Program
    worker: Any

    def run(self, ranges: Ranges) -> None:
        program, memory, barriers, worker = self.program, self.program.memory, self.program.barriers, self.worker
        for slot in range(program.sizes.stages):
            plgpu.barrier_arrive(barriers.q_free.at[slot])
            plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        plgpu.barrier_wait(barriers.kv_here.at[worker])
        d_k_DH, d_v_DH = self.gradients(ranges)
        (b, k, start), scale = program.place, program.how.request.scale
        keys = pl.ds(start + worker * ROWS, ROWS)
        # The values are not needed any more.
        for gradient, ref in ((d_v_DH, program.d_v_ref), (d_k_DH * scale, program.d_k_ref)):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            memory.v[worker] = gradient.astype(ref.dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(memory.v.at[worker], ref.at[b, keys, k])
        plgpu.wait_smem_to_gmem(0)

    def gradients(self, ranges: Ranges) -> tuple[jax.Array, jax.Array]:
        """Of the keys, still without the scale, and the values."""
        program, sizes, k = self.program, self.program.sizes, self.program.place[1]

        def sums(d_k_ref: Any, d_v_ref: Any) -> tuple[jax.Array, jax.Array]:
            def of_head(g: Any, so_far: Any) -> Any:
                step = partial(self.step, head=k * sizes.G + g, sums=(d_k_ref, d_v_ref))
                return over(ranges, step, so_far, program.how, is_tagged=program.is_tagged, backwards=False)

            product_DC = None
            if sizes.is_ahead:
                plgpu.barrier_wait(program.barriers.q_here.at[0])
                product_DC = self.scoped(self.begin)
            jax.lax.fori_loop(0, sizes.G, of_head, (jnp.int32(0), product_DC))
            return plgpu.wgmma_accumulator_load(d_k_ref), plgpu.wgmma_accumulator_load(d_v_ref)

        of_keys = plgpu.ACC((ROWS, sizes.H), jnp.float32)
        return pl.run_scoped(sums, of_keys, of_keys)

    def scoped(self, act: Callable[[Any], jax.Array]) -> jax.Array:
        """What is done with an accumulator of a block of logits."""
        return pl.run_scoped(act, plgpu.ACC(self.program.sizes.block, jnp.float32))

    def begin(self, product_ref: Any) -> jax.Array:
        self.multiply(product_ref, jnp.int32(0))
        return plgpu.wgmma_accumulator_load(product_ref)

    def multiply(self, product_ref: Any, n: Any) -> None:
        """Keys and queries of step n."""
        sizes, memory, slot = self.program.sizes, self.program.memory, slot_of(n, self.program.sizes.stages)
        for part in range(sizes.parts):
            some = memory.q.at[slot, :, pl.ds(part * sizes.columns, sizes.columns)]
            plgpu.wgmma(product_ref, memory.k.at[self.worker, part], some.transpose((1, 0)))

    def step(self, i: Any, so_far: Any, *, masked: bool, head: Any, sums: tuple[Any, Any]) -> Any:
        (n, product_DC), (d_k_ref, d_v_ref) = so_far, sums
        sizes, barriers, memory = self.program.sizes, self.program.barriers, self.program.memory
        slot, d_logits = slot_of(n, sizes.stages), memory.d_logits.at[slot_of(n, BUFFERS)]
        of_block = partial(self.d_logits, i=i, slot=slot, masked=masked, d_v_ref=d_v_ref)
        if sizes.is_ahead:
            plgpu.barrier_wait(barriers.d_out_here.at[slot])
            d_logits_DC = self.scoped(partial(of_block, lambda: product_DC))
        else:
            plgpu.barrier_wait(barriers.q_here.at[slot])
            plgpu.barrier_wait(barriers.d_out_here.at[slot])
            d_logits_DC = self.scoped(lambda product_ref: self.scoped(partial(of_block, self.product(product_ref, n))))
        d_logits[self.worker] = d_logits_DC
        plgpu.commit_smem()
        if sizes.is_ahead:
            # What the gradient of the values has read would take registers from what comes next.
            plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.d_logits_here)
        plgpu.barrier_wait(barriers.d_logits_here)

        def finish(part_ref: Any) -> jax.Array | None:
            self.d_queries(part_ref, d_logits)
            plgpu.wgmma(d_k_ref, d_logits_DC, memory.q.at[slot])
            # While the gradient of the keys and the next product are made.
            add = partial(self.add_to_queries, part_ref, i, head)
            if not sizes.is_ahead:
                return add(behind=1)
            plgpu.barrier_wait(barriers.q_here.at[slot_of(n + 1, sizes.stages)])
            return self.scoped(partial(self.next_product, n=n + 1, add=partial(add, behind=1 + sizes.parts)))

        product_DC = pl.run_scoped(finish, plgpu.ACC((ROWS, sizes.columns), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        return n + 1, product_DC

    def product(self, product_ref: Any, n: Any) -> Callable[[], jax.Array]:
        """Begun now, waited for when another has been begun behind it."""
        self.multiply(product_ref, n)
        return partial(plgpu.wgmma_accumulator_load, product_ref, wait_n=1)

    def next_product(self, product_ref: Any, *, n: Any, add: Callable[[], None]) -> jax.Array:
        self.multiply(product_ref, n)
        add()
        return plgpu.wgmma_accumulator_load(product_ref)

    def d_logits(
        self, product: Callable[[], jax.Array], d_weights_ref: Any, *, i: Any, slot: Any, masked: bool, d_v_ref: Any
    ) -> jax.Array:
        """Gradients of the logits of a block; on the way the weights are added up into that of the values."""
        program, memory, worker = self.program, self.program.memory, self.worker
        sizes, request, dtype, d_out = program.sizes, program.how.request, memory.v.dtype, memory.d_out.at[slot]
        plgpu.wgmma(d_weights_ref, memory.v.at[worker], d_out.transpose((1, 0)))
        logits_DC, factor, slope_DC = logits(product(), request)
        total_C = plgpu.layout_cast(memory.total.at[slot][...], ROW)
        weights_DC = jnp.exp2(logits_DC * factor - across(total_C, sizes.block))
        if masked:
            segments = None
            if program.is_tagged:
                of_keys = plgpu.layout_cast(memory.kv_segments.at[worker][...], COLUMN)
                segments = (plgpu.layout_cast(memory.q_segments.at[slot][...], ROW), of_keys)
            first = (i * sizes.C, program.place[2] + worker * ROWS)
            weights_DC = hidden_as(0.0, weights_DC, request, first, segments, query_axis=1)
        plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), d_out)
        d_weights_DC = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
        mean_C = plgpu.layout_cast(memory.mean.at[slot][...], ROW)
        d_logits_DC = weights_DC * (d_weights_DC - across(mean_C, sizes.block))
        return (d_logits_DC if slope_DC is None else d_logits_DC * slope_DC).astype(dtype)

    def d_queries(self, part_ref: Any, d_logits: Any) -> None:
        """This warpgroup's part of what all keys add to the gradient of a step's queries."""
        for other in range(WORKERS):
            if self.program.sizes.is_split_by_query:
                left = d_logits.at[other, :, pl.ds(self.worker * ROWS, ROWS)]
                right = self.program.memory.k.at[other, 0]
            else:
                left, right = d_logits.at[other], self.program.memory.k.at[other, self.worker]
            plgpu.wgmma(part_ref, left.transpose((1, 0)), right)

    def add_to_queries(self, part_ref: Any, i: Any, head: Any, *, behind: int) -> None:
        """With so many products begun behind it."""
        program, sizes, worker = self.program, self.program.sizes, self.worker
        part = plgpu.wgmma_accumulator_load(part_ref, wait_n=behind)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        program.memory.d_q[worker] = part
        plgpu.commit_smem()
        of_sequence = program.d_q_ref.at[program.place[0]]
        if sizes.is_split_by_query:
            to = of_sequence.at[pl.ds(i * sizes.C + worker * ROWS, ROWS), head]
        else:
            to = of_sequence.at[pl.ds(i * sizes.C, ROWS), head, pl.ds(worker * sizes.columns, sizes.columns)]
        plgpu.copy_smem_to_gmem(program.memory.d_q.at[worker], to, reduction_op="add")
