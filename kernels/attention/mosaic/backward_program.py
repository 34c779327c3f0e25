"""A program of the backward kernel: its position, its loads, and the operations that all its warpgroups share.

Tile geometry, shared memory and barriers come first.
"""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows, query_ranges
from maxhydra.kernels.attention.mosaic import KernelParams, Tile
from maxhydra.kernels.attention.mosaic.common import COLUMN, ROW, across, clip_ranges, logits, mask_with
from maxhydra.kernels.mosaic import ROWS, WORKERS, shared_memory, slot_of

# Largest head size for which the gradients of 64 keys and their values fit in the registers of one warpgroup.
OWN_KEYS = 128


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
    def is_shared(self) -> bool:
        """Whether both warpgroups work on the same keys, instead of on 64 each."""
        return self.H > OWN_KEYS

    @property
    def blocks(self) -> int:
        """Blocks of 64 keys of a program."""
        return 1 if self.is_shared else WORKERS

    @property
    def keys(self) -> int:
        return self.blocks * ROWS

    @property
    def block(self) -> tuple[int, int]:
        return ROWS, self.C

    @property
    def is_split_by_query(self) -> bool:
        """Whether a warpgroup computes the gradient of half of a step's queries, instead of half of the features."""
        return self.C == WORKERS * ROWS

    @property
    def columns(self) -> int:
        """Features of the gradient of the queries that a warpgroup computes at a time."""
        return self.H // self.parts

    @property
    def parts(self) -> int:
        if self.is_shared:
            # One part fits in a warpgroup's registers together with the gradient of keys or values.
            return self.H // ROWS
        return 1 if self.is_split_by_query else WORKERS

    @property
    def staging_slots(self) -> int:
        """Staging buffers for additions to the gradient of the queries."""
        return WORKERS + self.is_shared

    @property
    def is_pipelined(self) -> bool:
        """Whether a step starts the matmul of the next, for which only small blocks of queries leave registers."""
        return self.C == ROWS

    @property
    def d_out_stages(self) -> int:
        return 1 if self.is_shared else self.stages

    @property
    def buffers(self) -> int:
        """Buffers of the logits' gradients: with separate keys, a block is written while the other warpgroup may still
        read that of the step before."""
        return 1 if self.is_shared else 2


class Memory(NamedTuple):
    k: Any
    v: Any
    q: Any
    d_out: Any
    rows: Any
    """The sums of exponentials of all stages, then the means of all stages; one array, since each array is aligned to
    1,024 bytes, and the segments leave no space for that."""
    weights: Any
    """Passed from the warpgroup that computes them to the other; None if each has its own keys."""
    d_logits: Any
    d_q: Any
    segments: Any
    """Segments of the queries of all stages, then of the keys; one array for the same reason."""

    @classmethod
    def of(cls, sizes: Sizes, dtype: Any, *, has_segments: bool) -> "Memory":
        H, moving, d_out = sizes.H, (sizes.stages, sizes.C), (sizes.d_out_stages, sizes.C)
        return cls(
            k=shared_memory(sizes.blocks, sizes.parts, ROWS, sizes.columns, dtype=dtype),
            v=shared_memory(sizes.blocks, ROWS, H, dtype=dtype),
            q=shared_memory(*moving, H, dtype=dtype),
            d_out=shared_memory(*d_out, H, dtype=dtype),
            rows=plgpu.SMEM((sizes.stages + sizes.d_out_stages, sizes.C), jnp.float32),
            weights=shared_memory(*sizes.block, dtype=dtype) if sizes.is_shared else None,
            d_logits=shared_memory(sizes.buffers, sizes.blocks, *sizes.block, dtype=dtype),
            d_q=shared_memory(sizes.staging_slots, ROWS, sizes.columns, dtype=jnp.float32),
            segments=plgpu.SMEM((sizes.stages * sizes.C + sizes.keys,), jnp.int32) if has_segments else None,
        )


class Barriers(NamedTuple):
    """Barriers for data that has arrived in shared memory, and for slots that may be overwritten."""

    kv_ready: Any
    q_ready: Any
    d_out_ready: Any
    q_free: Any
    d_out_free: Any
    weights_ready: Any
    d_logits_ready: Any

    @classmethod
    def of(cls, sizes: Sizes, *, has_segments: bool) -> "Barriers":
        copies = 1 + sizes.parts + has_segments
        return cls(
            kv_ready=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.blocks),
            q_ready=plgpu.Barrier(num_arrivals=2 + has_segments, num_barriers=sizes.stages),
            d_out_ready=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.d_out_stages),
            q_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.stages),
            d_out_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.d_out_stages),
            weights_ready=plgpu.Barrier() if sizes.is_shared else None,
            d_logits_ready=plgpu.Barrier(num_arrivals=1 if sizes.is_shared else WORKERS),
        )


@dataclasses.dataclass(frozen=True)
class Program:
    params: KernelParams
    sizes: Sizes
    refs: Inputs
    rows: Rows
    segment_ranges_ref: Any
    d_q_ref: Any
    d_k_ref: Any
    d_v_ref: Any
    memory: Memory
    barriers: Barriers

    @property
    def has_segments(self) -> bool:
        return self.refs.q_segments_BT is not None

    @property
    def position(self) -> tuple[Any, Any, Any]:
        """Sequence, head and first key."""
        b, k, block = (jax.lax.axis_index(name) for name in ("b", "k", "block"))
        return b, k, block * self.sizes.keys

    @property
    def ranges(self) -> Ranges:
        """Ranges of the queries that see its keys."""
        (b, _, start), sizes = self.position, self.sizes
        ranges = query_ranges(
            self.params.request, start, C=sizes.C, D=sizes.keys, T=sizes.T, has_segments=self.has_segments
        )
        if self.has_segments:
            ranges = clip_ranges(ranges, self.segment_ranges_ref, b, jax.lax.div(start, jnp.int32(sizes.keys)))
        return ranges

    def total(self, slot: Any) -> Any:
        return self.memory.rows.at[slot]

    def mean(self, slot: Any) -> Any:
        return self.memory.rows.at[self.sizes.stages + slot]

    def q_segments(self, slot: Any) -> Any:
        return self.memory.segments.at[pl.ds(slot * self.sizes.C, self.sizes.C)]

    def kv_segments(self, block: Any) -> Any:
        return self.memory.segments.at[pl.ds(self.sizes.stages * self.sizes.C + block * ROWS, ROWS)]

    def load(self, ranges: Ranges) -> None:
        plgpu.set_max_registers(24, action="decrease")
        self.load_keys()
        self.load_queries(ranges)

    def load_keys(self) -> None:
        (b, k, start), refs, memory, columns = self.position, self.refs, self.memory, self.sizes.columns
        for block in range(self.sizes.blocks):
            ready, keys = self.barriers.kv_ready.at[block], pl.ds(start + block * ROWS, ROWS)
            for part in range(self.sizes.parts):
                columns_slice = pl.ds(part * columns, columns)
                plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, k, columns_slice], memory.k.at[block, part], ready)
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, k], memory.v.at[block], ready)
            if self.has_segments:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], self.kv_segments(block), ready)

    def load_queries(self, ranges: Ranges) -> None:
        (b, k, _), rows, memory, barriers = self.position, self.rows, self.memory, self.barriers
        C, G = self.sizes.C, self.sizes.G

        def step(i: Any, n: Any, *, head: Any) -> Any:
            self.load_query(i, n, head)
            slot, queries = slot_of(n, self.sizes.d_out_stages), pl.ds(i * C, C)
            ready = barriers.d_out_ready.at[slot]
            plgpu.barrier_wait(barriers.d_out_free.at[slot])
            plgpu.copy_gmem_to_smem(rows.d_out_BTNH.at[b, queries, head], memory.d_out.at[slot], ready)
            plgpu.copy_gmem_to_smem(rows.mean_BNT.at[b, head, queries], self.mean(slot), ready)
            return n + 1

        def fold_head(g: Any, n: Any) -> Any:
            return jax.lax.fori_loop(ranges.first, ranges.last, partial(step, head=k * G + g), n)

        steps = jax.lax.fori_loop(0, G, fold_head, jnp.int32(0))
        if self.sizes.is_pipelined:
            # For the matmul that the last step starts, whose result is unused.
            self.load_query(0, steps, k * G)

    def load_query(self, i: Any, n: Any, head: Any) -> None:
        b, refs, memory, barriers = self.position[0], self.refs, self.memory, self.barriers
        slot, queries = slot_of(n, self.sizes.stages), pl.ds(i * self.sizes.C, self.sizes.C)
        ready = barriers.q_ready.at[slot]
        plgpu.barrier_wait(barriers.q_free.at[slot])
        plgpu.copy_gmem_to_smem(refs.q_BTNH.at[b, queries, head], memory.q.at[slot], ready)
        plgpu.copy_gmem_to_smem(self.rows.total_BNT.at[b, head, queries], self.total(slot), ready)
        if self.has_segments:
            plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], self.q_segments(slot), ready)


@dataclasses.dataclass(frozen=True)
class Worker(abc.ABC):
    """A compute warpgroup."""

    program: Program
    worker: Any

    @abc.abstractmethod
    def run(self, ranges: Ranges) -> None:
        """Compute the gradients of its keys or values, and its part of the gradient of the queries."""

    def begin(self, block: Any) -> None:
        """Mark all slots as free for loading, and wait for the keys."""
        program, barriers = self.program, self.program.barriers
        for slot in range(program.sizes.stages):
            plgpu.barrier_arrive(barriers.q_free.at[slot])
        for slot in range(program.sizes.d_out_stages):
            plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        plgpu.barrier_wait(barriers.kv_ready.at[block])

    def scoped(self, visit: Callable[[Any], Any]) -> Any:
        """Run a function with an accumulator for a block of logits."""
        return pl.run_scoped(visit, plgpu.ACC(self.program.sizes.block, jnp.float32))

    def multiply(self, qk_ref: Any, n: Any, block: Any) -> None:
        """Multiply the keys by the queries of step n."""
        sizes, memory, slot = self.program.sizes, self.program.memory, slot_of(n, self.program.sizes.stages)
        for part in range(sizes.parts):
            columns_slice = memory.q.at[slot, :, pl.ds(part * sizes.columns, sizes.columns)]
            plgpu.wgmma(qk_ref, memory.k.at[block, part], columns_slice.transpose((1, 0)))

    def first_qk(self, block: Any) -> jax.Array:
        plgpu.barrier_wait(self.program.barriers.q_ready.at[0])

        def visit(qk_ref: Any) -> jax.Array:
            self.multiply(qk_ref, jnp.int32(0), block)
            return plgpu.wgmma_accumulator_load(qk_ref)

        return self.scoped(visit)

    def weights(
        self, qk_DC: jax.Array, *, i: Any, slot: Any, block: Any, masked: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Weights of a block, and the derivative of its logits (None: one)."""
        program, sizes, request = self.program, self.program.sizes, self.program.params.request
        logits_DC, factor, slope_DC = logits(qk_DC, request)
        total_C = plgpu.layout_cast(program.total(slot)[...], ROW)
        weights_DC = jnp.exp2(logits_DC * factor - across(total_C, sizes.block))
        if masked:
            segments = None
            if program.has_segments:
                kv_segments = plgpu.layout_cast(program.kv_segments(block)[...], COLUMN)
                segments = (plgpu.layout_cast(program.q_segments(slot)[...], ROW), kv_segments)
            first = (i * sizes.C, program.position[2] + block * ROWS)
            weights_DC = mask_with(0.0, weights_DC, request, first, segments, query_axis=1)
        return weights_DC, slope_DC

    def subtract_mean(self, d_weights_DC: jax.Array, slot: Any) -> jax.Array:
        mean_C = plgpu.layout_cast(self.program.mean(slot)[...], ROW)
        return d_weights_DC - across(mean_C, self.program.sizes.block)

    def add_to_queries(self, part: jax.Array, staging_slot: Any, target: Any, *, in_flight: int) -> None:
        """Add a part of the gradient of the queries to `target` by way of a staging buffer.

        `in_flight`: earlier copies that may still be in flight.
        """
        plgpu.wait_smem_to_gmem(in_flight, wait_read_only=True)
        self.program.memory.d_q[staging_slot] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.program.memory.d_q.at[staging_slot], target, reduction_op="add")

    def write(self, gradient: jax.Array, staging_slot: Any, target: Any) -> None:
        """Write the gradient of keys or values by way of shared memory that is no longer needed."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging_slot[...] = gradient.astype(target.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(staging_slot, target)
