"""The forward kernel: two warpgroups compute, 64 queries each, while a third loads keys and values for both.

A program goes over many tiles of queries, those that see most keys first, so that loading never waits for a tile's
end. The two take turns on the matrix unit: while one has it, the other makes its softmax (Shah et al., 2024).
"""

import heapq
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Ranges, key_ranges
from maxhydra.kernels.attention.mosaic.parts import (
    COLUMN,
    LOG2E,
    LOWEST,
    MATRIX,
    PARAMS,
    ROW,
    ROWS,
    How,
    Inputs,
    down,
    hidden_as,
    logits,
    memory,
    zeros,
)

WORKERS = 2
TURNS = True
# Keys and values of the heads that programs work on at a time stay in the cache.
CACHE_BYTES = 24 * 2**20


class Memory(NamedTuple):
    q: Any
    k: Any
    v: Any
    out: Any
    total: Any
    q_segments: Any
    kv_segments: Any


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over; the last of whose turn it is."""

    q_here: Any
    k_here: Any
    v_here: Any
    q_free: Any
    k_free: Any
    v_free: Any
    turn: Any


class Plan(NamedTuple):
    """Tiles of queries in the order in which they are taken."""

    T: int
    S: int
    N: int
    G: int
    H: int
    D: int
    stages: int
    heads: int
    """Of all sequences."""
    together: int
    """Heads whose tiles are taken before those of others."""

    @classmethod
    def of(cls, inputs: Inputs, how: How) -> "Plan":
        (B, T, N, H), (_, S, K, _) = inputs.q_BTNH.shape, inputs.k_BSKH.shape
        G, tile = N // K, how.tiles.forward
        fit = max(1, CACHE_BYTES // (2 * S * H * inputs.k_BSKH.dtype.itemsize))
        together = max(n for n in range(1, B * K + 1) if B * K % n == 0 and n <= fit)
        return cls(T, S, N, G, H, math.gcd(tile.size, S), tile.stages, B * N, together * G)

    @property
    def tiles(self) -> int:
        return self.heads * (self.T // (WORKERS * ROWS))

    def schedule(self, how: How) -> Any:
        """How many tiles each program has, and which: the next goes to the one that has least to do."""
        programs = min(how.programs, self.tiles)
        blocks, span = self.T // (WORKERS * ROWS), WORKERS * ROWS
        cost = []
        for block in range(blocks):
            reach = range(block * span, (block + 1) * span)
            first = 0
            if how.request.window is not None:
                first = max(0, reach.start - how.request.window + 1)
            if how.request.chunk is not None:
                first = reach.start // how.request.chunk * how.request.chunk
            cost.append((reach.stop if how.request.causal else self.S) // self.D - first // self.D + 1)
        heap = [(0, p) for p in range(programs)]
        mine: list[list[int]] = [[] for _ in range(programs)]
        for tile in range(self.tiles):
            had, p = heapq.heappop(heap)
            mine[p].append(tile)
            block = tile % (blocks * self.together) // self.together
            heapq.heappush(heap, (had + cost[blocks - 1 - block], p))
        most = max(map(len, mine))
        return np.array([[len(one), *one, *[0] * (most - len(one))] for one in mine], np.int32)

    def place(self, index: Any) -> tuple[Any, Any, Any]:
        """Sequence, head and first query of a tile."""
        blocks = self.T // (WORKERS * ROWS)
        part, index = _divided(index, blocks * self.together)
        block, head = _divided(index, self.together)
        b, n = _divided(part * self.together + head, self.N)
        return b, n, (blocks - 1 - block) * (WORKERS * ROWS)


def _divided(a: Any, b: int) -> tuple[Any, Any]:
    return jax.lax.div(a, jnp.int32(b)), jax.lax.rem(a, jnp.int32(b))


def forward(how: How, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """The values, and log2 of the sum of each row's exponentials, [B, N, T]."""
    q_BTNH = inputs.q_BTNH
    B, T, N, H = q_BTNH.shape
    plan = Plan.of(inputs, how)
    dtype, is_tagged = q_BTNH.dtype, inputs.q_segments_BT is not None
    scratch = Memory(
        q=memory(WORKERS, ROWS, H, dtype=dtype),
        k=memory(plan.stages, plan.D, H, dtype=dtype),
        v=memory(plan.stages, plan.D, H, dtype=dtype),
        out=memory(WORKERS, ROWS, H, dtype=dtype),
        total=plgpu.SMEM((WORKERS, ROWS), jnp.float32),
        q_segments=plgpu.SMEM((WORKERS, ROWS), jnp.int32) if is_tagged else None,
        kv_segments=plgpu.SMEM((plan.stages, plan.D), jnp.int32) if is_tagged else None,
    )
    barriers = Barriers(
        q_here=plgpu.Barrier(num_arrivals=1 + is_tagged, num_barriers=WORKERS),
        k_here=plgpu.Barrier(num_arrivals=1 + is_tagged, num_barriers=plan.stages),
        v_here=plgpu.Barrier(num_barriers=plan.stages),
        q_free=plgpu.Barrier(num_barriers=WORKERS),
        k_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
        v_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=plan.stages),
        turn=plgpu.Barrier(num_barriers=WORKERS),
    )
    out_BTNH, total_BNT = plgpu.kernel(
        partial(_kernel, how=how, plan=plan),
        out_type=(jax.ShapeDtypeStruct(q_BTNH.shape, dtype), jax.ShapeDtypeStruct((B, N, T), jnp.float32)),
        scratch_types=(scratch, barriers),
        grid=(min(how.programs, plan.tiles),),
        grid_names=("program",),
        num_threads=WORKERS + 1,
        thread_name="warpgroup",
        compiler_params=PARAMS,
        interpret=how.interpret,
        kernel_name="attention_forward",
    )(inputs, plan.schedule(how))
    return out_BTNH, total_BNT


def _kernel(
    refs: Inputs,
    schedule_ref: Any,
    out_ref: Any,
    total_ref: Any,
    memory: Memory,
    barriers: Barriers,
    *,
    how: How,
    plan: Plan,
) -> None:
    worker = jax.lax.axis_index("warpgroup")
    program = jax.lax.axis_index("program")
    count = schedule_ref[program, 0]
    is_tagged = refs.q_segments_BT is not None

    def over_tiles(tile: Any) -> None:
        def body(t: Any, n: Any) -> Any:
            b, head, start = plan.place(schedule_ref[program, t + 1])
            ranges = key_ranges(how.request, start, C=WORKERS * ROWS, D=plan.D, S=plan.S, is_tagged=is_tagged)
            tile(b, head, start, ranges, n)
            return n + ranges.last - ranges.first

        jax.lax.fori_loop(0, count, body, jnp.int32(0))

    @pl.when(worker == WORKERS)
    def _load() -> None:
        plgpu.set_max_registers(24, action="decrease")
        over_tiles(partial(_load_tile, refs, memory, barriers, plan))

    @pl.when(worker < WORKERS)
    def _compute() -> None:
        plgpu.set_max_registers(240, action="increase")
        plgpu.barrier_arrive(barriers.q_free.at[worker])
        for slot in range(plan.stages):
            plgpu.barrier_arrive(barriers.k_free.at[slot])
            plgpu.barrier_arrive(barriers.v_free.at[slot])
        if TURNS:
            pl.when(worker == 1)(lambda: plgpu.barrier_arrive(barriers.turn.at[0]))
        over_tiles(partial(_compute_tile, refs, (out_ref, total_ref), memory, barriers, worker, how, plan))
        plgpu.wait_smem_to_gmem(0)


def _load_tile(
    refs: Inputs, memory: Memory, barriers: Barriers, plan: Plan, b: Any, head: Any, start: Any, ranges: Ranges, n: Any
) -> None:
    kv_head = jax.lax.div(head, jnp.int32(plan.G))
    for worker in range(WORKERS):
        queries = pl.ds(start + worker * ROWS, ROWS)
        here = barriers.q_here.at[worker]
        plgpu.barrier_wait(barriers.q_free.at[worker])
        plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, head], memory.q.at[worker], here)
        if refs.q_segments_BT is not None:
            plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[worker], here)

    def step(j: Any, n: Any) -> Any:
        slot, keys = jax.lax.rem(n, jnp.int32(plan.stages)), pl.ds((ranges.last - 1 - j) * plan.D, plan.D)
        here = barriers.k_here.at[slot]
        plgpu.barrier_wait(barriers.k_free.at[slot])
        plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, kv_head], memory.k.at[slot], here)
        if refs.kv_segments_BS is not None:
            plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[slot], here)
        plgpu.barrier_wait(barriers.v_free.at[slot])
        plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, kv_head], memory.v.at[slot], barriers.v_here.at[slot])
        return n + 1

    jax.lax.fori_loop(0, ranges.last - ranges.first, step, n)


def _compute_tile(
    refs: Inputs,
    out_refs: tuple[Any, Any],
    memory: Memory,
    barriers: Barriers,
    worker: Any,
    how: How,
    plan: Plan,
    b: Any,
    head: Any,
    start: Any,
    ranges: Ranges,
    n: Any,
) -> None:
    """The softmax is taken as the keys come (Milakov and Gimelshein, 2018); a sink is a key whose value is zero."""
    D, H, request = plan.D, plan.H, how.request
    is_tagged = refs.q_segments_BT is not None
    start = start + worker * ROWS
    lowest = LOWEST * logits_factor(how)
    plgpu.barrier_wait(barriers.q_here.at[worker])
    of_queries = plgpu.layout_cast(memory.q_segments.at[worker][...], COLUMN) if is_tagged else None

    def softmax(product_CD: jax.Array, j: Any, slot: Any, top_C: jax.Array, total_C: jax.Array, *, masked: bool) -> Any:
        """Weights, what is kept of what was summed so far, and the new top and total."""
        segments = (
            (of_queries, plgpu.layout_cast(memory.kv_segments.at[slot][...], ROW)) if is_tagged and masked else None
        )
        plgpu.barrier_arrive(barriers.k_free.at[slot])
        logits_CD, factor, _ = logits(product_CD, request)
        if masked:
            logits_CD = hidden_as(LOWEST, logits_CD, request, (start, j * D), segments, query_axis=0)
        new_top_C = jnp.maximum(top_C, logits_CD.max(axis=1) * factor)
        kept_C = jnp.exp2(top_C - new_top_C)
        weights_CD = jnp.exp2(logits_CD * factor - down(new_top_C, logits_CD.shape))
        total_C = total_C * kept_C + weights_CD.sum(axis=1)
        return weights_CD, kept_C, new_top_C, total_C

    def multiply(slot: Any, product_ref: Any) -> None:
        plgpu.wgmma(product_ref, memory.q.at[worker], memory.k.at[slot].transpose((1, 0)))

    def begin(product_ref: Any) -> Any:
        slot, j = jax.lax.rem(n, jnp.int32(plan.stages)), ranges.last - 1
        multiply(slot, product_ref)
        return softmax(product_ref[...], j, slot, top_C, total_C, masked=is_masked)

    def step(j: Any, so_far: Any, *, masked: bool) -> Any:
        """Products of a block of keys and of the values before, and the softmax while the latter runs."""
        sums_CH, *state, n = so_far
        # Rounded when the product that read those before has ended, and before the next begin: none waits for it.
        short_CD = jax.lax.optimization_barrier(state[0].astype(refs.q_BTNH.dtype))
        slot, before = (jax.lax.rem(m, jnp.int32(plan.stages)) for m in (n, n - 1))
        plgpu.barrier_wait(barriers.v_here.at[before])
        plgpu.barrier_wait(barriers.k_here.at[slot])
        if TURNS:
            plgpu.barrier_wait(barriers.turn.at[worker])

        def attend(product_ref: Any, *, sums_ref: Any, short_CD: Any, top_C: Any, total_C: Any) -> Any:
            multiply(slot, product_ref)
            plgpu.wgmma(sums_ref, short_CD, memory.v.at[before])
            if TURNS:
                plgpu.barrier_arrive(barriers.turn.at[1 - worker])
            product_CD = plgpu.wgmma_accumulator_load(product_ref, wait_n=1)
            return softmax(product_CD, j, slot, top_C, total_C, masked=masked)

        def products(acc: Any) -> None:
            sums_ref, short_ref, kept_ref, top_ref, total_ref = acc
            now = partial(attend, sums_ref=sums_ref, short_CD=short_CD, top_C=top_ref[...], total_C=total_ref[...])
            new = pl.run_scoped(now, plgpu.ACC((ROWS, D), jnp.float32))
            short_ref[...], kept_ref[...], top_ref[...], total_ref[...] = new

        sums_CH, *state = pl.run_state(products)((plgpu.ACC.init(sums_CH), *state))
        state[0] = jax.lax.optimization_barrier(state[0])
        plgpu.barrier_arrive(barriers.v_free.at[before])
        return sums_CH * down(state[1], sums_CH.shape), *state, n + 1

    def end(sums_ref: Any, *, short_CD: jax.Array, slot: Any) -> None:
        plgpu.wgmma(sums_ref, short_CD, memory.v.at[slot])

    top_C = plgpu.layout_cast(jnp.full((ROWS,), lowest, jnp.float32), COLUMN)
    total_C = zeros(ROWS, layout=COLUMN)
    if refs.sinks_N is not None:
        top_C = plgpu.layout_cast(
            jnp.full((ROWS,), refs.sinks_N[head].astype(jnp.float32) * LOG2E, jnp.float32), COLUMN
        )
        total_C = total_C + 1
    is_masked = request.causal or is_tagged
    plgpu.barrier_wait(barriers.k_here.at[jax.lax.rem(n, jnp.int32(plan.stages))])
    state = pl.run_scoped(begin, plgpu.ACC((ROWS, D), jnp.float32))
    so_far = (zeros(ROWS, H, layout=MATRIX), *state, n + 1)
    so_far = over(ranges, request, step, so_far, is_tagged=is_tagged)
    sums_CH, weights_CD, _, top_C, total_C, n = so_far
    short_CD = weights_CD.astype(refs.q_BTNH.dtype)
    slot = jax.lax.rem(n - 1, jnp.int32(plan.stages))
    plgpu.barrier_wait(barriers.v_here.at[slot])
    sums_CH = pl.run_state(partial(end, short_CD=short_CD, slot=slot))(plgpu.ACC.init(sums_CH))
    plgpu.barrier_arrive(barriers.v_free.at[slot])
    plgpu.barrier_arrive(barriers.q_free.at[worker])

    share_C = 1 / total_C
    if is_tagged:
        # A query that sees nothing has summed up what is hidden from it.
        share_C = jnp.where(top_C <= lowest, 0.0, share_C)
    out_ref, total_ref = out_refs
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    memory.out[worker] = (sums_CH * down(share_C, sums_CH.shape)).astype(refs.q_BTNH.dtype)
    memory.total[worker] = top_C + jnp.log(total_C) * LOG2E
    plgpu.commit_smem()
    queries = pl.ds(start, ROWS)
    plgpu.copy_smem_to_gmem(memory.out.at[worker], out_ref.at[b, queries, head])
    plgpu.copy_smem_to_gmem(memory.total.at[worker], total_ref.at[b, head, queries])


def logits_factor(how: How) -> float:
    request = how.request
    return (request.scale if request.softcap is None else request.softcap) * LOG2E


def over(ranges: Ranges, request: Any, step: Any, so_far: Any, *, is_tagged: bool) -> Any:
    """The steps of all blocks but the last, backwards."""
    last = ranges.last - 1
    before, inside, after = (
        (ranges.first, ranges.whole, True),
        (ranges.whole, ranges.broken, False),
        (ranges.broken, ranges.last, True),
    )
    if is_tagged:
        loops = [(ranges.first, ranges.last, True)]
    elif request.window is not None or request.chunk is not None:
        loops = [after, inside, before]
    elif not request.causal:
        loops = [inside]
    else:
        loops = [after, inside]
    for start, stop, masked in loops:
        stop = jnp.minimum(stop, last)
        count = jnp.maximum(stop - start, 0)
        body = lambda i, so_far, stop=stop, masked=masked: step(stop - 1 - i, so_far, masked=masked)
        so_far = jax.lax.fori_loop(0, count, body, so_far)
    return so_far
