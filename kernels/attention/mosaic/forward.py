"""The forward kernel: two warpgroups compute, 64 queries each, while a third loads keys and values for both.

A program goes over many tiles of queries, so that loading never waits for a tile's end. Each step begins the product
of the next keys and the one with the values before, and makes the softmax of the former while the latter runs; the two
warpgroups take turns, so that one has the matrix unit while the other makes its softmax (Shah et al., 2024).
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import LOG2E, LOWEST, Inputs, Ranges, key_ranges
from maxhydra.kernels.attention.mosaic.common import (
    COLUMN,
    MATRIX,
    PARAMS,
    ROW,
    down,
    hidden_as,
    logits,
    meetings,
    narrowed,
    over,
    zeros,
)
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.attention.mosaic.tile_schedule import TILE, Plan
from maxhydra.kernels.mosaic import ROWS, WORKERS, memory, slot_of


class Memory(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    """None: where the queries were, since there is no room."""
    total: Any
    q_segments: Any
    kv_segments: Any

    @classmethod
    def of(cls, plan: Plan, dtype: Any, *, is_tagged: bool) -> "Memory":
        own, shared = (WORKERS, ROWS), (plan.stages, plan.D)
        return cls(
            q=memory(*own, plan.H, dtype=dtype),
            k=memory(*shared, plan.H, dtype=dtype),
            v=memory(*shared, plan.H, dtype=dtype),
            out=memory(*own, plan.H, dtype=dtype) if plan.H <= 128 else None,
            total=plgpu.SMEM(own, jnp.float32),
            q_segments=plgpu.SMEM(own, jnp.int32) if is_tagged else None,
            kv_segments=plgpu.SMEM(shared, jnp.int32) if is_tagged else None,
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over; the last of whose turn it is."""

    q_here: Any
    k_here: Any
    v_here: Any
    q_free: Any
    k_free: Any
    v_free: Any
    turn: Any

    @classmethod
    def of(cls, plan: Plan, *, is_tagged: bool) -> "Barriers":
        return cls(
            q_here=plgpu.Barrier(num_arrivals=1 + is_tagged, num_barriers=WORKERS),
            k_here=plgpu.Barrier(num_arrivals=1 + is_tagged, num_barriers=plan.stages),
            v_here=plgpu.Barrier(num_barriers=plan.stages),
            q_free=plgpu.Barrier(num_barriers=WORKERS),
            k_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
            v_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
            turn=plgpu.Barrier(num_barriers=WORKERS),
        )


@partial(jax.jit, static_argnums=0)
def forward(how: How, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The values, and log2 of the sum of each row's exponentials, [B, N, T]."""
    (B, T, N, _), dtype = inputs.q_BTNH.shape, inputs.q_BTNH.dtype
    plan, is_tagged = Plan.of(inputs, how), inputs.q_segments_BT is not None
    schedule, met = plan.schedule(how), None
    if is_tagged:
        met = meetings(inputs.q_segments_BT, inputs.kv_segments_BS, rows=TILE, columns=plan.D)

    def kernel(*arrays: Any) -> None:
        _Program(how, plan, *arrays).run()

    out_BTNH, total_BNT = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(inputs.q_BTNH.shape, dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        scratch_types=(Memory.of(plan, dtype, is_tagged=is_tagged), Barriers.of(plan, is_tagged=is_tagged)),
        grid=(len(schedule),),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        kernel_name="attention_forward",
    )(inputs, schedule, met)
    return out_BTNH, total_BNT


class _Tile(NamedTuple):
    b: Any
    head: Any
    start: Any
    """First query."""
    ranges: Ranges
    n: Any
    """Steps before it."""


@dataclasses.dataclass(frozen=True)
class _Program:
    how: How
    plan: Plan
    refs: Inputs
    schedule_ref: Any
    meetings_ref: Any
    out_ref: Any
    total_ref: Any
    memory: Memory
    barriers: Barriers

    @property
    def is_tagged(self) -> bool:
        return self.refs.q_segments_BT is not None

    def run(self) -> None:
        worker = jax.lax.axis_index("warpgroup")

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            self.over_tiles(self.load)

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_arrive(self.barriers.q_free.at[worker])
            for slot in range(self.plan.stages):
                plgpu.barrier_arrive(self.barriers.k_free.at[slot])
                plgpu.barrier_arrive(self.barriers.v_free.at[slot])
            pl.when(worker == 1)(lambda: plgpu.barrier_arrive(self.barriers.turn.at[0]))
            self.over_tiles(lambda tile: _Worker(self, worker, tile).run())
            plgpu.wait_smem_to_gmem(0)

    def over_tiles(self, act: Callable[[_Tile], None]) -> None:
        program, plan = jax.lax.axis_index("program"), self.plan

        def one(t: Any, n: Any) -> Any:
            b, head, start = plan.place(self.schedule_ref[program, t + 1])
            ranges = key_ranges(self.how.request, start, C=TILE, D=plan.D, S=plan.S, is_tagged=self.is_tagged)
            if self.is_tagged:
                ranges = narrowed(ranges, self.meetings_ref, b, jax.lax.div(start, jnp.int32(TILE)))
                # A tile that sees nothing finds that out from any block.
                ranges = ranges._replace(last=jnp.maximum(ranges.last, ranges.first + 1))
            act(_Tile(b, head, start, ranges, n))
            return n + ranges.last - ranges.first

        jax.lax.fori_loop(0, self.schedule_ref[program, 0], one, jnp.int32(0))

    def load(self, tile: _Tile) -> None:
        """Blocks of keys come from the last to the first, so that the one to begin with is the masked one."""
        refs, memory, barriers, D = self.refs, self.memory, self.barriers, self.plan.D
        b, kv_head = tile.b, jax.lax.div(tile.head, jnp.int32(self.plan.G))
        for worker in range(WORKERS):
            queries, here = pl.ds(tile.start + worker * ROWS, ROWS), barriers.q_here.at[worker]
            plgpu.barrier_wait(barriers.q_free.at[worker])
            plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, tile.head], memory.q.at[worker], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[worker], here)

        def step(j: Any, n: Any) -> Any:
            slot, keys = slot_of(n, self.plan.stages), pl.ds((tile.ranges.last - 1 - j) * D, D)
            here = barriers.k_here.at[slot]
            plgpu.barrier_wait(barriers.k_free.at[slot])
            plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, kv_head], memory.k.at[slot], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[slot], here)
            plgpu.barrier_wait(barriers.v_free.at[slot])
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, kv_head], memory.v.at[slot], barriers.v_here.at[slot])
            return n + 1

        jax.lax.fori_loop(0, tile.ranges.last - tile.ranges.first, step, tile.n)


class _Softmax(NamedTuple):
    """Taken as the keys come (Milakov and Gimelshein, 2018)."""

    weights_CD: jax.Array
    """Of the last block, not yet summed up."""
    kept_C: jax.Array
    """What the sums before have to be multiplied with."""
    top_C: jax.Array
    total_C: jax.Array


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A warpgroup at a tile."""

    program: _Program
    worker: Any
    tile: _Tile

    @property
    def lowest(self) -> float:
        request = self.program.how.request
        return LOWEST * LOG2E * (request.scale if request.softcap is None else request.softcap)

    @property
    def start(self) -> Any:
        return self.tile.start + self.worker * ROWS

    def run(self) -> None:
        program, barriers, n = self.program, self.program.barriers, self.tile.n
        plan, ranges = program.plan, self.tile.ranges
        plgpu.barrier_wait(barriers.q_here.at[self.worker])
        plgpu.barrier_wait(barriers.k_here.at[slot_of(n, plan.stages)])
        softmax = pl.run_scoped(self.begin, plgpu.ACC((ROWS, plan.D), jnp.float32))
        last = ranges.last - 1
        others = Ranges(ranges.first, jnp.minimum(ranges.whole, last), jnp.minimum(ranges.broken, last), last)
        so_far = (zeros(ROWS, plan.H, layout=MATRIX), softmax, n + 1)
        so_far = over(others, self.step, so_far, program.how, is_tagged=program.is_tagged, backwards=True)
        sums_CH, softmax, n = so_far
        slot = slot_of(n - 1, plan.stages)
        short_CD = softmax.weights_CD.astype(program.out_ref.dtype)
        plgpu.barrier_wait(barriers.v_here.at[slot])
        add = partial(plgpu.wgmma, a=short_CD, b=program.memory.v.at[slot])
        sums_CH = pl.run_state(add)(plgpu.ACC.init(sums_CH))
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        if program.memory.out is not None:
            plgpu.barrier_arrive(barriers.q_free.at[self.worker])
        self.write(sums_CH, softmax)

    def begin(self, product_ref: Any) -> _Softmax:
        """The softmax of the first block; a sink is a key whose value is zero."""
        program, slot = self.program, slot_of(self.tile.n, self.program.plan.stages)
        top, total_C = self.lowest, zeros(ROWS, layout=COLUMN)
        if program.refs.sinks_N is not None:
            top, total_C = program.refs.sinks_N[self.tile.head].astype(jnp.float32) * LOG2E, total_C + 1
        top_C = plgpu.layout_cast(jnp.full((ROWS,), top, jnp.float32), COLUMN)
        self.multiply(product_ref, slot)
        is_masked = program.how.request.causal or program.is_tagged
        return self.softmax(product_ref[...], self.tile.ranges.last - 1, slot, (top_C, total_C), masked=is_masked)

    def multiply(self, product_ref: Any, slot: Any) -> None:
        memory = self.program.memory
        plgpu.wgmma(product_ref, memory.q.at[self.worker], memory.k.at[slot].transpose((1, 0)))

    def softmax(self, product_CD: Any, j: Any, slot: Any, so_far: tuple[Any, Any], *, masked: bool) -> _Softmax:
        program, (top_C, total_C) = self.program, so_far
        segments = None
        if program.is_tagged:
            of_queries = plgpu.layout_cast(program.memory.q_segments.at[self.worker][...], COLUMN)
            segments = (of_queries, plgpu.layout_cast(program.memory.kv_segments.at[slot][...], ROW))
        plgpu.barrier_arrive(program.barriers.k_free.at[slot])
        logits_CD, factor, _ = logits(product_CD, program.how.request)
        if masked:
            first = (self.start, j * program.plan.D)
            logits_CD = hidden_as(LOWEST, logits_CD, program.how.request, first, segments, query_axis=0)
        new_top_C = jnp.maximum(top_C, logits_CD.max(axis=1) * factor)
        kept_C = jnp.exp2(top_C - new_top_C)
        weights_CD = jnp.exp2(logits_CD * factor - down(new_top_C, logits_CD.shape))
        return _Softmax(weights_CD, kept_C, new_top_C, total_C * kept_C + weights_CD.sum(axis=1))

    def step(self, j: Any, so_far: tuple[Any, _Softmax, Any], *, masked: bool) -> Any:
        (sums_CH, softmax, n), barriers, plan = so_far, self.program.barriers, self.program.plan
        slot, before = slot_of(n, plan.stages), slot_of(n - 1, plan.stages)
        # Rounded when the product that read those before has ended, and before the next begin: none waits for it.
        short_CD = jax.lax.optimization_barrier(softmax.weights_CD.astype(self.program.out_ref.dtype))
        plgpu.barrier_wait(barriers.v_here.at[before])
        plgpu.barrier_wait(barriers.k_here.at[slot])
        plgpu.barrier_wait(barriers.turn.at[self.worker])

        def attend(product_ref: Any, *, sums_ref: Any, so_far: tuple[Any, Any]) -> _Softmax:
            self.multiply(product_ref, slot)
            plgpu.wgmma(sums_ref, short_CD, self.program.memory.v.at[before])
            plgpu.barrier_arrive(barriers.turn.at[1 - self.worker])
            product_CD = plgpu.wgmma_accumulator_load(product_ref, wait_n=1)
            return self.softmax(product_CD, j, slot, so_far, masked=masked)

        def products(refs: tuple[Any, _Softmax]) -> None:
            sums_ref, of_softmax = refs
            so_far = (of_softmax.top_C[...], of_softmax.total_C[...])
            block = plgpu.ACC((ROWS, plan.D), jnp.float32)
            new = pl.run_scoped(partial(attend, sums_ref=sums_ref, so_far=so_far), block)
            for ref, value in zip(of_softmax, new, strict=True):
                ref[...] = value

        sums_CH, softmax = pl.run_state(products)((plgpu.ACC.init(sums_CH), softmax))
        plgpu.barrier_arrive(barriers.v_free.at[before])
        softmax = softmax._replace(weights_CD=jax.lax.optimization_barrier(softmax.weights_CD))
        return sums_CH * down(softmax.kept_C, sums_CH.shape), softmax, n + 1

    def write(self, sums_CH: jax.Array, softmax: _Softmax) -> None:
        program, memory, worker = self.program, self.program.memory, self.worker
        share_C = 1 / softmax.total_C
        if program.is_tagged:
            # A query that sees nothing has summed up what is hidden from it.
            share_C = jnp.where(softmax.top_C <= self.lowest, 0.0, share_C)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out = memory.q if memory.out is None else memory.out
        out[worker] = (sums_CH * down(share_C, sums_CH.shape)).astype(program.out_ref.dtype)
        memory.total[worker] = softmax.top_C + jnp.log(softmax.total_C) * LOG2E
        plgpu.commit_smem()
        (b, head), queries = self.tile[:2], pl.ds(self.start, ROWS)
        plgpu.copy_smem_to_gmem(out.at[worker], program.out_ref.at[b, queries, head])
        plgpu.copy_smem_to_gmem(memory.total.at[worker], program.total_ref.at[b, head, queries])
        if memory.out is None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(program.barriers.q_free.at[worker])
