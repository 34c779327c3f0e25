"""The backward kernel: a program has 128 keys, 64 to each of two warpgroups, and goes over all queries that see them.

Everything is turned, keys by queries, so that the weights and their gradients are left operands, which may come from
registers; the gradients of keys and values stay there too. The gradients of the logits also go through shared memory,
where both warpgroups find those of all 128 keys, and make a half each of what these add to the gradient of the queries.
It is summed in float32 in the order in which programs come to it, so two runs differ by rounding.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Ranges, query_ranges
from maxhydra.kernels.attention.mosaic.parts import (
    COLUMN,
    MATRIX,
    PARAMS,
    ROW,
    ROWS,
    How,
    Inputs,
    across,
    hidden_as,
    logits,
    memory,
    over,
    zeros,
)

WORKERS = 2
# Of the gradients of the logits: one is written while those of the step before and, by the other warpgroup, of the one
# before that may still be read.
BUFFERS = 3


class Rows(NamedTuple):
    """What comes with the queries: the gradient of what they gathered, and two numbers each."""

    d_out_BTNH: Any
    total_BNT: Any
    mean_BNT: Any


class Memory(NamedTuple):
    k: Any
    v: Any
    q: Any
    d_out: Any
    total: Any
    mean: Any
    d_logits: Any
    d_q: Any
    q_segments: Any
    kv_segments: Any


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    kv_here: Any
    q_here: Any
    d_out_here: Any
    q_free: Any
    d_out_free: Any
    d_logits_here: Any


class Sizes(NamedTuple):
    T: int
    G: int
    H: int
    C: int
    stages: int

    @classmethod
    def of(cls, inputs: Inputs, how: How) -> "Sizes":
        (_, T, N, H), K, tile = inputs.q_BTNH.shape, inputs.k_BSKH.shape[2], how.tiles.backward
        return cls(T, N // K, H, tile.size, tile.stages)

    @property
    def piece(self) -> tuple[int, int]:
        """What a warpgroup makes of a step's gradient of the queries: half of them, or half of each."""
        return (ROWS, self.H) if self.C == WORKERS * ROWS else (ROWS, self.H // WORKERS)


def backward(how: How, inputs: Inputs, rows: Rows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of queries, keys and values; that of the queries in float32 and still without the scale."""
    sizes = Sizes.of(inputs, how)
    (B, S, K, H), dtype = inputs.k_BSKH.shape, inputs.k_BSKH.dtype
    C, stages, piece = sizes.C, sizes.stages, sizes.piece
    is_tagged = inputs.q_segments_BT is not None
    scratch = Memory(
        k=memory(WORKERS, H // piece[1], ROWS, piece[1], dtype=dtype),
        v=memory(WORKERS, ROWS, H, dtype=dtype),
        q=memory(stages, C, H, dtype=dtype),
        d_out=memory(stages, C, H, dtype=dtype),
        total=plgpu.SMEM((stages, C), jnp.float32),
        mean=plgpu.SMEM((stages, C), jnp.float32),
        d_logits=memory(BUFFERS, WORKERS, ROWS, C, dtype=dtype),
        d_q=memory(WORKERS, *piece, dtype=jnp.float32),
        q_segments=plgpu.SMEM((stages, C), jnp.int32) if is_tagged else None,
        kv_segments=plgpu.SMEM((WORKERS, ROWS), jnp.int32) if is_tagged else None,
    )
    barriers = Barriers(
        kv_here=plgpu.Barrier(num_arrivals=1 + H // piece[1] + is_tagged, num_barriers=WORKERS),
        q_here=plgpu.Barrier(num_arrivals=2 + is_tagged, num_barriers=stages),
        d_out_here=plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        q_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
        d_out_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=stages),
        d_logits_here=plgpu.Barrier(num_arrivals=WORKERS),
    )
    of_keys = jax.ShapeDtypeStruct((B, S, K, H), dtype)
    d_q_ref = jax.new_ref(jnp.zeros(inputs.q_BTNH.shape, jnp.float32))

    def body(*refs: Any) -> None:
        kernel = partial(_kernel, *refs, how=how, sizes=sizes)
        pl.run_scoped(kernel, scratch, barriers, collective_axes="warpgroup")

    d_k_BSKH, d_v_BSKH = pl.kernel(
        body,
        out_type=(of_keys, of_keys),
        mesh=plgpu.Mesh(
            grid=(B, K, S // (WORKERS * ROWS)),
            grid_names=("b", "k", "block"),
            num_threads=WORKERS + 1,
            thread_name="warpgroup",
        ),
        compiler_params=PARAMS,
        interpret=how.interpret,
        name="attention_backward",
    )(inputs, rows, d_q_ref)
    return d_q_ref[...], d_k_BSKH, d_v_BSKH


def _kernel(
    refs: Inputs,
    rows: Rows,
    d_q_ref: Any,
    d_k_ref: Any,
    d_v_ref: Any,
    memory: Memory,
    barriers: Barriers,
    *,
    how: How,
    sizes: Sizes,
) -> None:
    worker = jax.lax.axis_index("warpgroup")
    b, k = jax.lax.axis_index("b"), jax.lax.axis_index("k")
    start = jax.lax.axis_index("block") * (WORKERS * ROWS)
    is_tagged = refs.q_segments_BT is not None
    ranges = query_ranges(how.request, start, C=sizes.C, D=WORKERS * ROWS, T=sizes.T, is_tagged=is_tagged)

    @pl.when(worker == WORKERS)
    def _load() -> None:
        plgpu.set_max_registers(24, action="decrease")
        _load_keys(refs, memory, barriers, sizes, b, k, start)
        _load_queries(refs, rows, memory, barriers, sizes, b, k, ranges)

    @pl.when(worker < WORKERS)
    def _compute() -> None:
        plgpu.set_max_registers(240, action="increase")
        for slot in range(sizes.stages):
            plgpu.barrier_arrive(barriers.q_free.at[slot])
            plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        plgpu.barrier_wait(barriers.kv_here.at[worker])
        d_k_DH, d_v_DH = _compute_keys(refs, d_q_ref, memory, barriers, worker, how, sizes, (b, k, start), ranges)
        # What is there of keys and values has been read by both: the last step's barrier came after.
        keys = pl.ds(start + worker * ROWS, ROWS)
        plgpu.wait_smem_to_gmem(0)
        memory.v[worker] = (d_v_DH).astype(d_v_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.v.at[worker], d_v_ref.at[b, keys, k])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.v[worker] = (d_k_DH * how.request.scale).astype(d_k_ref.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(memory.v.at[worker], d_k_ref.at[b, keys, k])
        plgpu.wait_smem_to_gmem(0)


def _load_keys(refs: Inputs, memory: Memory, barriers: Barriers, sizes: Sizes, b: Any, k: Any, start: Any) -> None:
    columns = sizes.piece[1]
    for worker in range(WORKERS):
        here, keys = barriers.kv_here.at[worker], pl.ds(start + worker * ROWS, ROWS)
        for part in range(sizes.H // columns):
            some = pl.ds(part * columns, columns)
            plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, k, some], memory.k.at[worker, part], here)
        plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, k], memory.v.at[worker], here)
        if refs.kv_segments_BS is not None:
            plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[worker], here)


def _load_queries(
    refs: Inputs, rows: Rows, memory: Memory, barriers: Barriers, sizes: Sizes, b: Any, k: Any, ranges: Ranges
) -> None:
    def step(i: Any, n: Any, *, head: Any) -> Any:
        slot, queries = jax.lax.rem(n, jnp.int32(sizes.stages)), pl.ds(i * sizes.C, sizes.C)
        here = barriers.q_here.at[slot]
        plgpu.barrier_wait(barriers.q_free.at[slot])
        plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, head], memory.q.at[slot], here)
        plgpu.copy_gmem_to_smem(rows.total_BNT.at[b, head, queries], memory.total.at[slot], here)
        if refs.q_segments_BT is not None:
            plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[slot], here)
        here = barriers.d_out_here.at[slot]
        plgpu.barrier_wait(barriers.d_out_free.at[slot])
        plgpu.copy_gmem_to_smem(rows.d_out_BTNH.at[b, queries, head], memory.d_out.at[slot], here)
        plgpu.copy_gmem_to_smem(rows.mean_BNT.at[b, head, queries], memory.mean.at[slot], here)
        return n + 1

    def of_head(g: Any, n: Any) -> Any:
        return jax.lax.fori_loop(ranges.first, ranges.last, partial(step, head=k * sizes.G + g), n)

    jax.lax.fori_loop(0, sizes.G, of_head, jnp.int32(0))


def _compute_keys(
    refs: Inputs,
    d_q_ref: Any,
    memory: Memory,
    barriers: Barriers,
    worker: Any,
    how: How,
    sizes: Sizes,
    place: tuple[Any, Any, Any],
    ranges: Ranges,
) -> tuple[jax.Array, jax.Array]:
    (C, H, G), (b, k, start) = (sizes.C, sizes.H, sizes.G), place
    request, dtype = how.request, refs.q_BTNH.dtype
    piece, is_tagged = sizes.piece, refs.q_segments_BT is not None
    start = start + worker * ROWS
    of_keys = plgpu.layout_cast(memory.kv_segments.at[worker][...], COLUMN) if is_tagged else None
    shape = (ROWS, C)

    def add_to_queries(part: jax.Array, i: Any, head: Any) -> None:
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        memory.d_q[worker] = part
        plgpu.commit_smem()
        if piece[1] == H:
            to = d_q_ref.at[b, pl.ds(i * C + worker * ROWS, ROWS), head]
        else:
            to = d_q_ref.at[b, pl.ds(i * C, C), head, pl.ds(worker * piece[1], piece[1])]
        plgpu.copy_smem_to_gmem(memory.d_q.at[worker], to, reduction_op="add")

    def d_queries(part_ref: Any, buffer: Any) -> None:
        for other in range(WORKERS):
            if piece[1] == H:
                left = memory.d_logits.at[buffer, other, :, pl.ds(worker * ROWS, ROWS)]
                right = memory.k.at[other, 0]
            else:
                left = memory.d_logits.at[buffer, other]
                right = memory.k.at[other, worker]
            plgpu.wgmma(part_ref, left.transpose((1, 0)), right)

    def step(i: Any, so_far: Any, *, masked: bool, head: Any) -> Any:
        """The gradient of the queries is a step behind, so that neither warpgroup waits for the other."""
        d_k_DH, d_v_DH, before, n = so_far
        slot = jax.lax.rem(n, jnp.int32(sizes.stages))
        buffer, buffer_before = (jax.lax.rem(m, jnp.int32(BUFFERS)) for m in (n, n + BUFFERS - 1))
        q, d_out = memory.q.at[slot], memory.d_out.at[slot]
        plgpu.barrier_wait(barriers.q_here.at[slot])
        plgpu.barrier_wait(barriers.d_out_here.at[slot])

        def d_logits(product_ref: Any, d_weights_ref: Any, *, d_v_ref: Any) -> jax.Array:
            for some in range(H // piece[1]):
                columns = q.at[:, pl.ds(some * piece[1], piece[1])]
                plgpu.wgmma(product_ref, memory.k.at[worker, some], columns.transpose((1, 0)))
            plgpu.wgmma(d_weights_ref, memory.v.at[worker], d_out.transpose((1, 0)))
            logits_DC, factor, slope_DC = logits(plgpu.wgmma_accumulator_load(product_ref, wait_n=1), request)
            total_C = plgpu.layout_cast(memory.total.at[slot][...], ROW)
            weights_DC = jnp.exp2(logits_DC * factor - across(total_C, shape))
            if masked:
                segments = None
                if is_tagged:
                    segments = (plgpu.layout_cast(memory.q_segments.at[slot][...], ROW), of_keys)
                weights_DC = hidden_as(0.0, weights_DC, request, (i * C, start), segments, query_axis=1)
            plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), d_out)
            d_weights_DC = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
            mean_C = plgpu.layout_cast(memory.mean.at[slot][...], ROW)
            d_logits_DC = weights_DC * (d_weights_DC - across(mean_C, shape))
            return (d_logits_DC if slope_DC is None else d_logits_DC * slope_DC).astype(dtype)

        def finish(part_ref: Any, *, d_k_ref: Any, d_logits_DC: jax.Array) -> None:
            d_queries(part_ref, buffer_before)
            memory.d_logits[buffer, worker] = d_logits_DC
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.d_logits_here)
            plgpu.wgmma(d_k_ref, d_logits_DC, q)
            add_to_queries(plgpu.wgmma_accumulator_load(part_ref, wait_n=1), *before)

        def products(acc: Any) -> None:
            d_k_ref, d_v_ref = acc
            blocks = [plgpu.ACC(shape, jnp.float32)] * 2
            d_logits_DC = pl.run_scoped(partial(d_logits, d_v_ref=d_v_ref), *blocks)
            plgpu.barrier_wait(barriers.d_logits_here)
            end = partial(finish, d_k_ref=d_k_ref, d_logits_DC=d_logits_DC)
            pl.run_scoped(end, plgpu.ACC(piece, jnp.float32))

        d_k_DH, d_v_DH = pl.run_state(products)((plgpu.ACC.init(d_k_DH), plgpu.ACC.init(d_v_DH)))
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        return d_k_DH, d_v_DH, (i, head), n + 1

    def of_head(g: Any, so_far: Any) -> Any:
        one = partial(step, head=k * G + g)
        return over(ranges, request, one, so_far, is_tagged=is_tagged, by_keys=True)

    nothing = zeros(ROWS, H, layout=MATRIX)
    # The first step adds nothing to its own queries.
    memory.d_logits[BUFFERS - 1, worker] = zeros(*shape, layout=MATRIX).astype(dtype)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barriers.d_logits_here)
    so_far = (nothing, nothing, (ranges.first, k * G), jnp.int32(0))
    d_k_DH, d_v_DH, last, n = jax.lax.fori_loop(0, G, of_head, so_far)
    plgpu.barrier_wait(barriers.d_logits_here)

    def remaining(part_ref: Any) -> jax.Array:
        d_queries(part_ref, jax.lax.rem(n + BUFFERS - 1, jnp.int32(BUFFERS)))
        return part_ref[...]

    add_to_queries(pl.run_scoped(remaining, plgpu.ACC(piece, jnp.float32)), *last)
    return d_k_DH, d_v_DH
