"""A program of the backward kernel: its position, its loads, and the operations that all its warpgroups share."""

import abc
import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs, Ranges, Rows, query_ranges
from maxhydra.kernels.attention.mosaic import KernelParams
from maxhydra.kernels.attention.mosaic.backward_smem import Barriers, Memory, Sizes
from maxhydra.kernels.attention.mosaic.common import COLUMN, ROW, across, clip_ranges, logits, mask_with
from maxhydra.kernels.mosaic import ROWS, slot_of


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
