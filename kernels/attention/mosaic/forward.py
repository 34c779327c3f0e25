"""The forward kernel: two warpgroups compute, 64 queries each, while a third loads keys and values for both.

A persistent program processes many tiles of queries, so loads never wait for the end of a tile. Each step starts the
matmul with the next keys and the matmul of the previous weights with their values, and computes the softmax of the
former while the latter runs. The two warpgroups alternate (ping-pong), so that one uses the tensor cores while the
other computes its softmax (Shah et al., 2024).
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
from maxhydra.kernels.attention.mosaic import KernelParams
from maxhydra.kernels.attention.mosaic.common import (
    COLUMN,
    COMPILER_PARAMS,
    MATRIX,
    ROW,
    TILE,
    TilePlan,
    clip_ranges,
    down,
    fold_blocks,
    logits,
    mask_with,
    shared_segment_ranges,
    zeros,
)
from maxhydra.kernels.mosaic import ROWS, WORKERS, shared_memory, slot_of


class Memory(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    """None: the output reuses the memory of the queries, since there is no space."""
    total: Any
    q_segments: Any
    kv_segments: Any

    @classmethod
    def of(cls, plan: TilePlan, dtype: Any, *, has_segments: bool) -> "Memory":
        per_worker, shared = (WORKERS, ROWS), (plan.stages, plan.D)
        return cls(
            q=shared_memory(*per_worker, plan.H, dtype=dtype),
            k=shared_memory(*shared, plan.H, dtype=dtype),
            v=shared_memory(*shared, plan.H, dtype=dtype),
            out=shared_memory(*per_worker, plan.H, dtype=dtype) if plan.H <= 128 else None,
            total=plgpu.SMEM(per_worker, jnp.float32),
            q_segments=plgpu.SMEM(per_worker, jnp.int32) if has_segments else None,
            kv_segments=plgpu.SMEM(shared, jnp.int32) if has_segments else None,
        )


class Barriers(NamedTuple):
    """Barriers for data that has arrived, and for slots that may be overwritten; `turn` alternates the warpgroups."""

    q_ready: Any
    k_ready: Any
    v_ready: Any
    q_free: Any
    k_free: Any
    v_free: Any
    turn: Any

    @classmethod
    def of(cls, plan: TilePlan, *, has_segments: bool) -> "Barriers":
        return cls(
            q_ready=plgpu.Barrier(num_arrivals=1 + has_segments, num_barriers=WORKERS),
            k_ready=plgpu.Barrier(num_arrivals=1 + has_segments, num_barriers=plan.stages),
            v_ready=plgpu.Barrier(num_barriers=plan.stages),
            q_free=plgpu.Barrier(num_barriers=WORKERS),
            k_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
            v_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
            turn=plgpu.Barrier(num_barriers=WORKERS),
        )


@partial(jax.jit, static_argnums=0)
def forward(params: KernelParams, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The outputs, and log2 of the sum of each row's exponentials, [B, N, T]."""
    (B, T, N, _), dtype = inputs.q_BTNH.shape, inputs.q_BTNH.dtype
    plan, has_segments = TilePlan.of(inputs, params), inputs.q_segments_BT is not None
    schedule, segment_ranges = plan.schedule(params), None
    if has_segments:
        segment_ranges = shared_segment_ranges(inputs.q_segments_BT, inputs.kv_segments_BS, rows=TILE, columns=plan.D)

    def kernel(*arrays: Any) -> None:
        _Program(params, plan, *arrays).run()

    out_BTNH, total_BNT = plgpu.kernel(
        kernel,
        out_type=(
            jax.ShapeDtypeStruct(inputs.q_BTNH.shape, dtype),
            jax.ShapeDtypeStruct((B, N, T), jnp.float32),
        ),
        scratch_types=(Memory.of(plan, dtype, has_segments=has_segments), Barriers.of(plan, has_segments=has_segments)),
        grid=(len(schedule),),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=COMPILER_PARAMS,
        kernel_name="attention_forward",
    )(inputs, schedule, segment_ranges)
    return out_BTNH, total_BNT


class _Tile(NamedTuple):
    b: Any
    head: Any
    start: Any
    """First query."""
    ranges: Ranges
    n: Any
    """Steps before this tile."""


@dataclasses.dataclass(frozen=True)
class _Program:
    params: KernelParams
    plan: TilePlan
    refs: Inputs
    schedule_ref: Any
    segment_ranges_ref: Any
    out_ref: Any
    total_ref: Any
    memory: Memory
    barriers: Barriers

    @property
    def has_segments(self) -> bool:
        return self.refs.q_segments_BT is not None

    def run(self) -> None:
        worker = jax.lax.axis_index("warpgroup")

        @pl.when(worker == WORKERS)
        def _load() -> None:
            plgpu.set_max_registers(24, action="decrease")
            self.for_each_tile(self.load)

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            plgpu.barrier_arrive(self.barriers.q_free.at[worker])
            for slot in range(self.plan.stages):
                plgpu.barrier_arrive(self.barriers.k_free.at[slot])
                plgpu.barrier_arrive(self.barriers.v_free.at[slot])
            pl.when(worker == 1)(lambda: plgpu.barrier_arrive(self.barriers.turn.at[0]))
            self.for_each_tile(lambda tile: _Worker(self, worker, tile).run())
            plgpu.wait_smem_to_gmem(0)

    def for_each_tile(self, visit: Callable[[_Tile], None]) -> None:
        program, plan = jax.lax.axis_index("program"), self.plan

        def step(t: Any, n: Any) -> Any:
            b, head, start = plan.position(self.schedule_ref[program, t + 1])
            ranges = key_ranges(self.params.request, start, C=TILE, D=plan.D, S=plan.S, has_segments=self.has_segments)
            if self.has_segments:
                ranges = clip_ranges(ranges, self.segment_ranges_ref, b, jax.lax.div(start, jnp.int32(TILE)))
                # A tile that sees no key still processes one block, and finds all of it masked.
                ranges = ranges._replace(last=jnp.maximum(ranges.last, ranges.first + 1))
            visit(_Tile(b, head, start, ranges, n))
            return n + ranges.last - ranges.first

        jax.lax.fori_loop(0, self.schedule_ref[program, 0], step, jnp.int32(0))

    def load(self, tile: _Tile) -> None:
        """Load blocks of keys from the last to the first, so that the first one processed is the masked one."""
        refs, memory, barriers, D = self.refs, self.memory, self.barriers, self.plan.D
        b, kv_head = tile.b, jax.lax.div(tile.head, jnp.int32(self.plan.G))
        for worker in range(WORKERS):
            queries, ready = pl.ds(tile.start + worker * ROWS, ROWS), barriers.q_ready.at[worker]
            plgpu.barrier_wait(barriers.q_free.at[worker])
            plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, tile.head], memory.q.at[worker], ready)
            if self.has_segments:
                plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[worker], ready)

        def step(j: Any, n: Any) -> Any:
            slot, keys = slot_of(n, self.plan.stages), pl.ds((tile.ranges.last - 1 - j) * D, D)
            ready = barriers.k_ready.at[slot]
            plgpu.barrier_wait(barriers.k_free.at[slot])
            plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, kv_head], memory.k.at[slot], ready)
            if self.has_segments:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[slot], ready)
            plgpu.barrier_wait(barriers.v_free.at[slot])
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, kv_head], memory.v.at[slot], barriers.v_ready.at[slot])
            return n + 1

        jax.lax.fori_loop(0, tile.ranges.last - tile.ranges.first, step, tile.n)


class _Softmax(NamedTuple):
    """State of the online softmax (Milakov and Gimelshein, 2018)."""

    weights_CD: jax.Array
    """Weights of the last block, not yet multiplied by its values."""
    rescale_C: jax.Array
    """Factor that rescales the earlier sums."""
    top_C: jax.Array
    total_C: jax.Array


@dataclasses.dataclass(frozen=True)
class _Worker:
    """A compute warpgroup on one tile."""

    program: _Program
    worker: Any
    tile: _Tile

    @property
    def lowest(self) -> float:
        request = self.program.params.request
        return LOWEST * LOG2E * (request.scale if request.softcap is None else request.softcap)

    @property
    def start(self) -> Any:
        return self.tile.start + self.worker * ROWS

    def run(self) -> None:
        program, barriers, n = self.program, self.program.barriers, self.tile.n
        plan, ranges = program.plan, self.tile.ranges
        plgpu.barrier_wait(barriers.q_ready.at[self.worker])
        plgpu.barrier_wait(barriers.k_ready.at[slot_of(n, plan.stages)])
        softmax = pl.run_scoped(self.begin, plgpu.ACC((ROWS, plan.D), jnp.float32))
        last = ranges.last - 1
        other_blocks = Ranges(ranges.first, jnp.minimum(ranges.whole, last), jnp.minimum(ranges.broken, last), last)
        carry = (zeros(ROWS, plan.H, layout=MATRIX), softmax, n + 1)
        carry = fold_blocks(
            other_blocks, self.step, carry, program.params, has_segments=program.has_segments, backwards=True
        )
        sums_CH, softmax, n = carry
        slot = slot_of(n - 1, plan.stages)
        narrow_CD = softmax.weights_CD.astype(program.out_ref.dtype)
        plgpu.barrier_wait(barriers.v_ready.at[slot])
        add = partial(plgpu.wgmma, a=narrow_CD, b=program.memory.v.at[slot])
        sums_CH = pl.run_state(add)(plgpu.ACC.init(sums_CH))
        plgpu.barrier_arrive(barriers.v_free.at[slot])
        if program.memory.out is not None:
            plgpu.barrier_arrive(barriers.q_free.at[self.worker])
        self.write(sums_CH, softmax)

    def begin(self, qk_ref: Any) -> _Softmax:
        """The softmax of the first block; a sink is a key whose value is zero."""
        program, slot = self.program, slot_of(self.tile.n, self.program.plan.stages)
        top, total_C = self.lowest, zeros(ROWS, layout=COLUMN)
        if program.refs.sinks_N is not None:
            top, total_C = program.refs.sinks_N[self.tile.head].astype(jnp.float32) * LOG2E, total_C + 1
        top_C = plgpu.layout_cast(jnp.full((ROWS,), top, jnp.float32), COLUMN)
        self.multiply(qk_ref, slot)
        is_masked = program.params.request.causal or program.has_segments
        return self.softmax(qk_ref[...], self.tile.ranges.last - 1, slot, (top_C, total_C), masked=is_masked)

    def multiply(self, qk_ref: Any, slot: Any) -> None:
        memory = self.program.memory
        plgpu.wgmma(qk_ref, memory.q.at[self.worker], memory.k.at[slot].transpose((1, 0)))

    def softmax(self, qk_CD: Any, j: Any, slot: Any, carry: tuple[Any, Any], *, masked: bool) -> _Softmax:
        program, (top_C, total_C) = self.program, carry
        segments = None
        if program.has_segments:
            q_segments = plgpu.layout_cast(program.memory.q_segments.at[self.worker][...], COLUMN)
            segments = (q_segments, plgpu.layout_cast(program.memory.kv_segments.at[slot][...], ROW))
        plgpu.barrier_arrive(program.barriers.k_free.at[slot])
        logits_CD, factor, _ = logits(qk_CD, program.params.request)
        if masked:
            first = (self.start, j * program.plan.D)
            logits_CD = mask_with(LOWEST, logits_CD, program.params.request, first, segments, query_axis=0)
        new_top_C = jnp.maximum(top_C, logits_CD.max(axis=1) * factor)
        rescale_C = jnp.exp2(top_C - new_top_C)
        weights_CD = jnp.exp2(logits_CD * factor - down(new_top_C, logits_CD.shape))
        return _Softmax(weights_CD, rescale_C, new_top_C, total_C * rescale_C + weights_CD.sum(axis=1))

    def step(self, j: Any, carry: tuple[Any, _Softmax, Any], *, masked: bool) -> Any:
        (sums_CH, softmax, n), barriers, plan = carry, self.program.barriers, self.program.plan
        slot, before = slot_of(n, plan.stages), slot_of(n - 1, plan.stages)
        # Rounded after the matmul that read the previous weights and before the next ones start: none waits for it.
        narrow_CD = jax.lax.optimization_barrier(softmax.weights_CD.astype(self.program.out_ref.dtype))
        plgpu.barrier_wait(barriers.v_ready.at[before])
        plgpu.barrier_wait(barriers.k_ready.at[slot])
        plgpu.barrier_wait(barriers.turn.at[self.worker])

        def attend(qk_ref: Any, *, sums_ref: Any, carry: tuple[Any, Any]) -> _Softmax:
            self.multiply(qk_ref, slot)
            plgpu.wgmma(sums_ref, narrow_CD, self.program.memory.v.at[before])
            plgpu.barrier_arrive(barriers.turn.at[1 - self.worker])
            qk_CD = plgpu.wgmma_accumulator_load(qk_ref, wait_n=1)
            return self.softmax(qk_CD, j, slot, carry, masked=masked)

        def run_matmuls(refs: tuple[Any, _Softmax]) -> None:
            sums_ref, softmax_refs = refs
            carry = (softmax_refs.top_C[...], softmax_refs.total_C[...])
            block = plgpu.ACC((ROWS, plan.D), jnp.float32)
            new = pl.run_scoped(partial(attend, sums_ref=sums_ref, carry=carry), block)
            for ref, value in zip(softmax_refs, new, strict=True):
                ref[...] = value

        sums_CH, softmax = pl.run_state(run_matmuls)((plgpu.ACC.init(sums_CH), softmax))
        plgpu.barrier_arrive(barriers.v_free.at[before])
        softmax = softmax._replace(weights_CD=jax.lax.optimization_barrier(softmax.weights_CD))
        return sums_CH * down(softmax.rescale_C, sums_CH.shape), softmax, n + 1

    def write(self, sums_CH: jax.Array, softmax: _Softmax) -> None:
        program, memory, worker = self.program, self.program.memory, self.worker
        share_C = 1 / softmax.total_C
        if program.has_segments:
            # A query that sees no key has accumulated masked ones.
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
