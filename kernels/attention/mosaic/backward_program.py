"""A program of the backward kernel: what it works on, what is loaded for it, and what all its warpgroups do alike."""

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
from maxhydra.kernels.attention.mosaic.backward_smem import Barriers, Memory, Sizes
from maxhydra.kernels.attention.mosaic.common import COLUMN, ROW, across, hidden_as, logits, narrowed
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.mosaic import ROWS, slot_of


@dataclasses.dataclass(frozen=True)
class Program:
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
        return b, k, block * self.sizes.keys

    @property
    def ranges(self) -> Ranges:
        """Of the queries that see its keys."""
        (b, _, start), sizes = self.place, self.sizes
        ranges = query_ranges(self.how.request, start, C=sizes.C, D=sizes.keys, T=sizes.T, is_tagged=self.is_tagged)
        if self.is_tagged:
            ranges = narrowed(ranges, self.meetings_ref, b, jax.lax.div(start, jnp.int32(sizes.keys)))
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
        (b, k, start), refs, memory, columns = self.place, self.refs, self.memory, self.sizes.columns
        for block in range(self.sizes.blocks):
            here, keys = self.barriers.kv_here.at[block], pl.ds(start + block * ROWS, ROWS)
            for part in range(self.sizes.parts):
                some = pl.ds(part * columns, columns)
                plgpu.copy_gmem_to_smem(refs.k_BSKH.at[b, keys, k, some], memory.k.at[block, part], here)
            plgpu.copy_gmem_to_smem(refs.v_BSKH.at[b, keys, k], memory.v.at[block], here)
            if self.is_tagged:
                plgpu.copy_gmem_to_smem(refs.kv_segments_BS.at[b, keys], self.kv_segments(block), here)

    def load_queries(self, ranges: Ranges) -> None:
        (b, k, _), rows, memory, barriers = self.place, self.rows, self.memory, self.barriers
        C, G = self.sizes.C, self.sizes.G

        def step(i: Any, n: Any, *, head: Any) -> Any:
            self.load_query(i, n, head)
            slot, queries = slot_of(n, self.sizes.d_out_stages), pl.ds(i * C, C)
            here = barriers.d_out_here.at[slot]
            plgpu.barrier_wait(barriers.d_out_free.at[slot])
            plgpu.copy_gmem_to_smem(rows.d_out_BTNH.at[b, queries, head], memory.d_out.at[slot], here)
            plgpu.copy_gmem_to_smem(rows.mean_BNT.at[b, head, queries], self.mean(slot), here)
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
        plgpu.copy_gmem_to_smem(self.rows.total_BNT.at[b, head, queries], self.total(slot), here)
        if self.is_tagged:
            plgpu.copy_gmem_to_smem(refs.q_segments_BT.at[b, queries], self.q_segments(slot), here)


@dataclasses.dataclass(frozen=True)
class Worker(abc.ABC):
    """A warpgroup that computes."""

    program: Program
    worker: Any

    @abc.abstractmethod
    def run(self, ranges: Ranges) -> None:
        """The gradients of its keys or values, and its part of that of the queries."""

    def begin(self, block: Any) -> None:
        """Its memory may be loaded; the keys are waited for."""
        program, barriers = self.program, self.program.barriers
        for slot in range(program.sizes.stages):
            plgpu.barrier_arrive(barriers.q_free.at[slot])
        for slot in range(program.sizes.d_out_stages):
            plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        plgpu.barrier_wait(barriers.kv_here.at[block])

    def scoped(self, act: Callable[[Any], Any]) -> Any:
        """What is done with an accumulator of a block of logits."""
        return pl.run_scoped(act, plgpu.ACC(self.program.sizes.block, jnp.float32))

    def multiply(self, product_ref: Any, n: Any, block: Any) -> None:
        """Keys and queries of step n."""
        sizes, memory, slot = self.program.sizes, self.program.memory, slot_of(n, self.program.sizes.stages)
        for part in range(sizes.parts):
            some = memory.q.at[slot, :, pl.ds(part * sizes.columns, sizes.columns)]
            plgpu.wgmma(product_ref, memory.k.at[block, part], some.transpose((1, 0)))

    def first_product(self, block: Any) -> jax.Array:
        plgpu.barrier_wait(self.program.barriers.q_here.at[0])

        def act(product_ref: Any) -> jax.Array:
            self.multiply(product_ref, jnp.int32(0), block)
            return plgpu.wgmma_accumulator_load(product_ref)

        return self.scoped(act)

    def weights(
        self, product_DC: jax.Array, *, i: Any, slot: Any, block: Any, masked: bool
    ) -> tuple[jax.Array, jax.Array | None]:
        """Of a block, and the slope of its logits; None: one."""
        program, sizes, request = self.program, self.program.sizes, self.program.how.request
        logits_DC, factor, slope_DC = logits(product_DC, request)
        total_C = plgpu.layout_cast(program.total(slot)[...], ROW)
        weights_DC = jnp.exp2(logits_DC * factor - across(total_C, sizes.block))
        if masked:
            segments = None
            if program.is_tagged:
                of_keys = plgpu.layout_cast(program.kv_segments(block)[...], COLUMN)
                segments = (plgpu.layout_cast(program.q_segments(slot)[...], ROW), of_keys)
            first = (i * sizes.C, program.place[2] + block * ROWS)
            weights_DC = hidden_as(0.0, weights_DC, request, first, segments, query_axis=1)
        return weights_DC, slope_DC

    def less_mean(self, d_weights_DC: jax.Array, slot: Any) -> jax.Array:
        mean_C = plgpu.layout_cast(self.program.mean(slot)[...], ROW)
        return d_weights_DC - across(mean_C, self.program.sizes.block)

    def add_to_queries(self, part: jax.Array, room: Any, to: Any, *, on_their_way: int) -> None:
        """From there; so many others may still be read."""
        plgpu.wait_smem_to_gmem(on_their_way, wait_read_only=True)
        self.program.memory.d_q[room] = part
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.program.memory.d_q.at[room], to, reduction_op="add")

    def write(self, gradient: jax.Array, room: Any, to: Any) -> None:
        """Of keys or values, by way of memory that nobody needs any more."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        room[...] = gradient.astype(to.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(room, to)
