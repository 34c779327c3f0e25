"""The backward kernel: a program has 128 keys, 64 to each of two warpgroups, and goes over all queries that see them.

Everything is turned, keys by queries, so that the weights and their gradients are left operands, which may come from
registers; the gradients of keys and values stay there too. The gradients of the logits also go through shared memory,
where both warpgroups find those of all 128 keys, and make a half each of what these add to the gradient of the queries.
It is summed in float32 in the order in which programs come to it, so two runs differ by rounding.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows, query_ranges
from maxhydra.kernels.attention.mosaic.how import How, Tile
from maxhydra.kernels.attention.mosaic.parts import (
    COLUMN,
    MATRIX,
    PARAMS,
    ROW,
    ROWS,
    WORKERS,
    across,
    hidden_as,
    logits,
    meetings,
    memory,
    narrowed,
    over,
    slot_of,
    zeros,
)

# Of the gradients of the logits: a block is written while the other warpgroup may still read that of the step before.
BUFFERS = 2
# Keys of a program.
KEYS = WORKERS * ROWS


class Sizes(NamedTuple):
    T: int
    G: int
    H: int
    C: int
    stages: int

    @classmethod
    def of(cls, inputs: Inputs, tile: Tile) -> "Sizes":
        (_, T, N, H), K = inputs.q_BTNH.shape, inputs.k_BSKH.shape[2]
        return cls(T, N // K, H, tile.size, tile.stages)

    @property
    def block(self) -> tuple[int, int]:
        return ROWS, self.C

    @property
    def is_split_by_query(self) -> bool:
        """Whether a warpgroup makes the gradient of half of the queries of a step, or half of the gradient of each."""
        return self.C == WORKERS * ROWS

    @property
    def columns(self) -> int:
        """Of the gradient of the queries that a warpgroup makes."""
        return self.H if self.is_split_by_query else self.H // WORKERS


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

    @classmethod
    def of(cls, sizes: Sizes, dtype: Any, *, is_tagged: bool) -> "Memory":
        H, columns, moving = sizes.H, sizes.columns, (sizes.stages, sizes.C)
        return cls(
            k=memory(WORKERS, H // columns, ROWS, columns, dtype=dtype),
            v=memory(WORKERS, ROWS, H, dtype=dtype),
            q=memory(*moving, H, dtype=dtype),
            d_out=memory(*moving, H, dtype=dtype),
            total=plgpu.SMEM(moving, jnp.float32),
            mean=plgpu.SMEM(moving, jnp.float32),
            d_logits=memory(BUFFERS, WORKERS, *sizes.block, dtype=dtype),
            d_q=memory(WORKERS, ROWS, columns, dtype=jnp.float32),
            q_segments=plgpu.SMEM(moving, jnp.int32) if is_tagged else None,
            kv_segments=plgpu.SMEM((WORKERS, ROWS), jnp.int32) if is_tagged else None,
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    kv_here: Any
    q_here: Any
    d_out_here: Any
    q_free: Any
    d_out_free: Any
    d_logits_here: Any

    @classmethod
    def of(cls, sizes: Sizes, *, is_tagged: bool) -> "Barriers":
        copies = 1 + sizes.H // sizes.columns + is_tagged
        return cls(
            kv_here=plgpu.Barrier(num_arrivals=copies, num_barriers=WORKERS),
            q_here=plgpu.Barrier(num_arrivals=2 + is_tagged, num_barriers=sizes.stages),
            d_out_here=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.stages),
            q_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.stages),
            d_out_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.stages),
            d_logits_here=plgpu.Barrier(num_arrivals=WORKERS),
        )


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
    d_q_ref = jax.new_ref(jnp.zeros(inputs.q_BTNH.shape, jnp.float32))
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

        @pl.when(worker < WORKERS)
        def _compute() -> None:
            plgpu.set_max_registers(240, action="increase")
            _Worker(self, worker).run(ranges)

    def load_keys(self) -> None:
        (b, k, start), refs, memory, columns = self.place, self.refs, self.memory, self.sizes.columns
        for worker in range(WORKERS):
            here, keys = self.barriers.kv_here.at[worker], pl.ds(start + worker * ROWS, ROWS)
            for part in range(self.sizes.H // columns):
                some = pl.ds(part * columns, columns)
                plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, k, some], memory.k.at[worker, part], here)
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, k], memory.v.at[worker], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], memory.kv_segments.at[worker], here)

    def load_queries(self, ranges: Ranges) -> None:
        (b, k, _), refs, rows, memory, barriers = self.place, self.refs, self.rows, self.memory, self.barriers
        C, G, stages = self.sizes.C, self.sizes.G, self.sizes.stages

        def step(i: Any, n: Any, *, head: Any) -> Any:
            slot, queries = slot_of(n, stages), pl.ds(i * C, C)
            here = barriers.q_here.at[slot]
            plgpu.barrier_wait(barriers.q_free.at[slot])
            plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, head], memory.q.at[slot], here)
            plgpu.copy_gmem_to_smem(rows.total_BNT.at[b, head, queries], memory.total.at[slot], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], memory.q_segments.at[slot], here)
            here = barriers.d_out_here.at[slot]
            plgpu.barrier_wait(barriers.d_out_free.at[slot])
            plgpu.copy_gmem_to_smem(rows.d_out_BTNH.at[b, queries, head], memory.d_out.at[slot], here)
            plgpu.copy_gmem_to_smem(rows.mean_BNT.at[b, head, queries], memory.mean.at[slot], here)
            return n + 1

        def of_head(g: Any, n: Any) -> Any:
            return jax.lax.fori_loop(ranges.first, ranges.last, partial(step, head=k * G + g), n)

        jax.lax.fori_loop(0, G, of_head, jnp.int32(0))


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
        program, G = self.program, self.program.sizes.G
        (_, k, _), nothing = program.place, zeros(ROWS, program.sizes.H, layout=MATRIX)

        def of_head(g: Any, so_far: Any) -> Any:
            step = partial(self.step, head=k * G + g)
            return over(ranges, step, so_far, program.how, is_tagged=program.is_tagged, backwards=False)

        d_k_DH, d_v_DH, _ = jax.lax.fori_loop(0, G, of_head, (nothing, nothing, jnp.int32(0)))
        return d_k_DH, d_v_DH

    def step(self, i: Any, so_far: Any, *, masked: bool, head: Any) -> Any:
        d_k_DH, d_v_DH, n = so_far
        sizes, barriers, slot = self.program.sizes, self.program.barriers, slot_of(n, self.program.sizes.stages)
        d_logits = self.program.memory.d_logits.at[slot_of(n, BUFFERS)]
        plgpu.barrier_wait(barriers.q_here.at[slot])
        plgpu.barrier_wait(barriers.d_out_here.at[slot])

        def finish(part_ref: Any, *, d_k_ref: Any, d_logits_DC: jax.Array) -> None:
            self.d_queries(part_ref, d_logits)
            plgpu.wgmma(d_k_ref, d_logits_DC, self.program.memory.q.at[slot])
            # While the gradient of the keys is made.
            self.add_to_queries(plgpu.wgmma_accumulator_load(part_ref, wait_n=1), i, head)

        def products(refs: Any) -> None:
            d_k_ref, d_v_ref = refs
            begin = partial(self.d_logits, i=i, slot=slot, masked=masked, d_v_ref=d_v_ref)
            d_logits_DC = pl.run_scoped(begin, *[plgpu.ACC(sizes.block, jnp.float32)] * 2)
            d_logits[self.worker] = d_logits_DC
            plgpu.commit_smem()
            plgpu.barrier_arrive(barriers.d_logits_here)
            plgpu.barrier_wait(barriers.d_logits_here)
            end = partial(finish, d_k_ref=d_k_ref, d_logits_DC=d_logits_DC)
            pl.run_scoped(end, plgpu.ACC((ROWS, sizes.columns), jnp.float32))

        d_k_DH, d_v_DH = pl.run_state(products)((plgpu.ACC.init(d_k_DH), plgpu.ACC.init(d_v_DH)))
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        return d_k_DH, d_v_DH, n + 1

    def d_logits(
        self, product_ref: Any, d_weights_ref: Any, *, i: Any, slot: Any, masked: bool, d_v_ref: Any
    ) -> jax.Array:
        """Gradients of the logits of a block; on the way the weights are added up into that of the values."""
        program, memory, worker = self.program, self.program.memory, self.worker
        sizes, request, dtype = program.sizes, program.how.request, memory.v.dtype
        q, d_out = memory.q.at[slot], memory.d_out.at[slot]
        for part in range(sizes.H // sizes.columns):
            some = q.at[:, pl.ds(part * sizes.columns, sizes.columns)]
            plgpu.wgmma(product_ref, memory.k.at[worker, part], some.transpose((1, 0)))
        plgpu.wgmma(d_weights_ref, memory.v.at[worker], d_out.transpose((1, 0)))
        logits_DC, factor, slope_DC = logits(plgpu.wgmma_accumulator_load(product_ref, wait_n=1), request)
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

    def add_to_queries(self, part: jax.Array, i: Any, head: Any) -> None:
        program, sizes, worker = self.program, self.program.sizes, self.worker
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        program.memory.d_q[worker] = part
        plgpu.commit_smem()
        of_sequence = program.d_q_ref.at[program.place[0]]
        if sizes.is_split_by_query:
            to = of_sequence.at[pl.ds(i * sizes.C + worker * ROWS, ROWS), head]
        else:
            to = of_sequence.at[pl.ds(i * sizes.C, ROWS), head, pl.ds(worker * sizes.columns, sizes.columns)]
        plgpu.copy_smem_to_gmem(program.memory.d_q.at[worker], to, reduction_op="add")
