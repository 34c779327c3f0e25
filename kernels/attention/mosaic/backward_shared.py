"""Warpgroups of the backward kernel: both on the same 64 keys for large heads, or 64 keys for each.

The gradients of keys and values of large heads do not fit in the registers of one warpgroup. One computes the weights
and accumulates the gradient of the values, the other computes the gradients of the logits and accumulates that of the
keys. The gradient of the queries has four parts: the first warpgroup, which also computes the softmax, takes one of
them. (With two each, 16 query and 8 key heads with a soft-cap, batch 2, 4,096 tokens, take 2.36 ms on an H200 instead
of 1.97; with a cluster of two programs that share the loads of their queries, 2.31.)

Data passes between them through shared memory once per step in each direction, and the barrier that announces it also
releases the buffer of the other direction: the weights of a step arrive when their warpgroup has read the gradients of
the logits of the step before, and those arrive when the weights have been read.

With 64 keys for each warpgroup, the gradients of the logits also go through shared memory, from where both warpgroups
read those of all 128 keys and compute one half each of the gradient of the queries.

If registers allow, the matmul of the next step's logits is started behind the gradients of this step, to keep the
tensor cores busy between loop iterations.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Ranges
from maxhydra.kernels.attention.mosaic.backward_program import Worker
from maxhydra.kernels.attention.mosaic.common import MATRIX, fold_blocks
from maxhydra.kernels.mosaic import ROWS, WORKERS, slot_of

# Index of the only block of keys, and of the only slot of the outputs' gradient.
ONE = 0


class _SharedWorker(Worker):
    parts: ClassVar[tuple[int, ...]]
    """Parts of the gradient of the queries that this warpgroup computes."""
    staging_slots: ClassVar[tuple[int, ...]]
    """Staging buffers from which they are added, in turn."""

    @property
    def keys(self) -> tuple[Any, Any, Any]:
        """Index of the program's keys in the arrays of their gradients."""
        b, k, start = self.program.position
        return b, pl.ds(start, ROWS), k

    def fold_heads(self, visit: Callable[..., Any], carry: Any) -> Any:
        G, k = self.program.sizes.G, self.program.position[1]
        return jax.lax.fori_loop(0, G, lambda g, carry: visit(carry, head=k * G + g), carry)

    def d_queries(self, part_ref: Any, which: int) -> None:
        memory = self.program.memory
        plgpu.wgmma(part_ref, memory.d_logits.at[0, ONE].transpose((1, 0)), memory.k.at[ONE, self.parts[which]])

    def add(self, part_ref: Any, which: int, i: Any, head: Any, *, behind: int) -> None:
        """Add a part to the gradient of the queries; `behind`: matmuls issued after its own."""
        program, columns = self.program, self.program.sizes.columns
        of_sequence = program.d_q_ref.at[program.position[0]]
        target = of_sequence.at[pl.ds(i * ROWS, ROWS), head, pl.ds(self.parts[which] * columns, columns)]
        part = plgpu.wgmma_accumulator_load(part_ref, wait_n=behind)
        staging_slot = self.staging_slots[which % len(self.staging_slots)]
        self.add_to_queries(part, staging_slot, target, in_flight=min(which, len(self.staging_slots) - 1))

    def remaining_parts(self, i: Any, head: Any) -> None:
        """Compute and add all parts but the first."""

        def one(part_ref: Any, *, which: int) -> None:
            self.d_queries(part_ref, which)
            self.add(part_ref, which, i, head, behind=0)

        for which in range(1, len(self.parts)):
            self.scoped_part(partial(one, which=which))

    def scoped_part(self, visit: Callable[[Any], Any]) -> Any:
        return pl.run_scoped(visit, plgpu.ACC((ROWS, self.program.sizes.columns), jnp.float32))


@dataclasses.dataclass(frozen=True)
class ValueWorker(_SharedWorker):
    parts = (0,)
    staging_slots = (0,)

    def run(self, ranges: Ranges) -> None:
        program = self.program
        self.begin(ONE)

        def total(d_v_ref: Any) -> jax.Array:
            def fold_head(carry: Any, *, head: Any) -> Any:
                step = partial(self.step, head=head, d_v_ref=d_v_ref)
                return fold_blocks(
                    ranges, step, carry, program.params, has_segments=program.has_segments, backwards=False
                )

            self.fold_heads(fold_head, (jnp.int32(0), self.first_qk(ONE)))
            return plgpu.wgmma_accumulator_load(d_v_ref)

        d_v_DH = pl.run_scoped(total, plgpu.ACC((ROWS, program.sizes.H), jnp.float32))
        # The values are no longer needed: the last gradients of the logits have been computed.
        self.write(d_v_DH, program.memory.v.at[ONE], program.d_v_ref.at[self.keys])
        plgpu.wait_smem_to_gmem(0)

    def step(self, i: Any, carry: Any, *, masked: bool, head: Any, d_v_ref: Any) -> Any:
        (n, qk_DC), memory, barriers = carry, self.program.memory, self.program.barriers
        sizes, dtype = self.program.sizes, memory.v.dtype
        slot = slot_of(n, sizes.stages)
        weights_DC, slope_DC = self.weights(qk_DC, i=i, slot=slot, block=ONE, masked=masked)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        memory.weights[...] = (weights_DC if slope_DC is None else weights_DC * slope_DC).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.weights_ready)
        plgpu.barrier_wait(barriers.d_out_ready.at[ONE])
        plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), memory.d_out.at[ONE])
        # Its operands would take registers from the next operations.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.d_out_free.at[ONE])
        plgpu.barrier_wait(barriers.d_logits_ready)

        def finish(part_ref: Any) -> jax.Array:
            self.d_queries(part_ref, 0)
            plgpu.barrier_wait(barriers.q_ready.at[slot_of(n + 1, sizes.stages)])
            return self.scoped(partial(next_qk, part_ref))

        def next_qk(part_ref: Any, qk_ref: Any) -> jax.Array:
            self.multiply(qk_ref, n + 1, ONE)
            self.add(part_ref, 0, i, head, behind=sizes.parts)
            self.remaining_parts(i, head)
            return plgpu.wgmma_accumulator_load(qk_ref)

        return n + 1, self.scoped_part(finish)


@dataclasses.dataclass(frozen=True)
class KeyWorker(_SharedWorker):
    parts = (1, 2, 3)
    staging_slots = (1, 2)

    def run(self, ranges: Ranges) -> None:
        program, sizes = self.program, self.program.sizes
        self.begin(ONE)

        def total(d_k_ref: Any) -> tuple[jax.Array, Any]:
            def fold_head(n: Any, *, head: Any) -> Any:
                # A single loop without masks, since masked pairs already have a weight of zero.
                return jax.lax.fori_loop(ranges.first, ranges.last, partial(self.step, head=head, d_k_ref=d_k_ref), n)

            n = self.fold_heads(fold_head, jnp.int32(0))
            return plgpu.wgmma_accumulator_load(d_k_ref), n

        d_k_DH, n = pl.run_scoped(total, plgpu.ACC((ROWS, sizes.H), jnp.float32))
        # The last queries are no longer needed; the unused prefetched ones may still arrive, in the other slot.
        staging_slot = program.memory.q.at[slot_of(n + 1, sizes.stages)]
        self.write(d_k_DH * program.params.request.scale, staging_slot, program.d_k_ref.at[self.keys])
        plgpu.wait_smem_to_gmem(0)

    def step(self, i: Any, n: Any, *, head: Any, d_k_ref: Any) -> Any:
        memory, barriers, dtype = self.program.memory, self.program.barriers, self.program.memory.v.dtype
        slot = slot_of(n, self.program.sizes.stages)
        plgpu.barrier_wait(barriers.d_out_ready.at[ONE])
        d_weights_DC = self.subtract_mean(self.scoped(self.d_weights), ONE)
        plgpu.barrier_arrive(barriers.d_out_free.at[ONE])
        plgpu.barrier_wait(barriers.weights_ready)
        weights_DC = plgpu.layout_cast(memory.weights[...], MATRIX).astype(jnp.float32)
        d_logits_DC = (weights_DC * d_weights_DC).astype(dtype)
        memory.d_logits[0, ONE] = d_logits_DC
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.d_logits_ready)
        plgpu.barrier_wait(barriers.q_ready.at[slot])

        def first(part_ref: Any) -> None:
            self.d_queries(part_ref, 0)
            plgpu.wgmma(d_k_ref, d_logits_DC, memory.q.at[slot])
            self.add(part_ref, 0, i, head, behind=1)

        self.scoped_part(first)
        self.remaining_parts(i, head)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        return n + 1

    def d_weights(self, d_weights_ref: Any) -> jax.Array:
        memory = self.program.memory
        plgpu.wgmma(d_weights_ref, memory.v.at[ONE], memory.d_out.at[ONE].transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(d_weights_ref)


@dataclasses.dataclass(frozen=True)
class SplitWorker(Worker):
    """A warpgroup with its own keys."""

    def run(self, ranges: Ranges) -> None:
        program, memory, worker = self.program, self.program.memory, self.worker
        self.begin(worker)
        d_k_DH, d_v_DH = self.gradients(ranges)
        (b, k, start), scale = program.position, program.params.request.scale
        keys = pl.ds(start + worker * ROWS, ROWS)
        # The values are no longer needed.
        for gradient, ref in ((d_v_DH, program.d_v_ref), (d_k_DH * scale, program.d_k_ref)):
            self.write(gradient, memory.v.at[worker], ref.at[b, keys, k])
        plgpu.wait_smem_to_gmem(0)

    def gradients(self, ranges: Ranges) -> tuple[jax.Array, jax.Array]:
        """Gradients of the keys, without the scale, and of the values."""
        program, sizes, k = self.program, self.program.sizes, self.program.position[1]

        def sums(d_k_ref: Any, d_v_ref: Any) -> tuple[jax.Array, jax.Array]:
            def fold_head(g: Any, carry: Any) -> Any:
                step = partial(self.step, head=k * sizes.G + g, sums=(d_k_ref, d_v_ref))
                return fold_blocks(
                    ranges, step, carry, program.params, has_segments=program.has_segments, backwards=False
                )

            qk_DC = self.first_qk(self.worker) if sizes.is_pipelined else None
            jax.lax.fori_loop(0, sizes.G, fold_head, (jnp.int32(0), qk_DC))
            return plgpu.wgmma_accumulator_load(d_k_ref), plgpu.wgmma_accumulator_load(d_v_ref)

        accumulator = plgpu.ACC((ROWS, sizes.H), jnp.float32)
        return pl.run_scoped(sums, accumulator, accumulator)

    def step(self, i: Any, carry: Any, *, masked: bool, head: Any, sums: tuple[Any, Any]) -> Any:
        (n, qk_DC), (d_k_ref, d_v_ref) = carry, sums
        sizes, barriers, memory = self.program.sizes, self.program.barriers, self.program.memory
        slot, d_logits = slot_of(n, sizes.stages), memory.d_logits.at[slot_of(n, sizes.buffers)]
        of_block = partial(self.d_logits, i=i, slot=slot, masked=masked, d_v_ref=d_v_ref)
        if sizes.is_pipelined:
            plgpu.barrier_wait(barriers.d_out_ready.at[slot])
            d_logits_DC = self.scoped(partial(of_block, lambda: qk_DC))
        else:
            plgpu.barrier_wait(barriers.q_ready.at[slot])
            plgpu.barrier_wait(barriers.d_out_ready.at[slot])
            d_logits_DC = self.scoped(lambda qk_ref: self.scoped(partial(of_block, self.qk(qk_ref, n))))
        d_logits[self.worker] = d_logits_DC
        plgpu.commit_smem()
        if sizes.is_pipelined:
            # The operands of the values' gradient would take registers from the next operations.
            plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.d_logits_ready)
        plgpu.barrier_wait(barriers.d_logits_ready)

        def finish(part_ref: Any) -> jax.Array | None:
            self.d_queries(part_ref, d_logits)
            plgpu.wgmma(d_k_ref, d_logits_DC, memory.q.at[slot])
            # Overlaps with the matmuls of the keys' gradient and of the next logits.
            add = partial(self.add, part_ref, i, head)
            if not sizes.is_pipelined:
                return add(behind=1)
            plgpu.barrier_wait(barriers.q_ready.at[slot_of(n + 1, sizes.stages)])
            return self.scoped(partial(self.next_qk, n=n + 1, add=partial(add, behind=1 + sizes.parts)))

        qk_DC = pl.run_scoped(finish, plgpu.ACC((ROWS, sizes.columns), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        return n + 1, qk_DC

    def qk(self, qk_ref: Any, n: Any) -> Callable[[], jax.Array]:
        """Start the matmul now; the returned function waits for it once another one has been issued."""
        self.multiply(qk_ref, n, self.worker)
        return partial(plgpu.wgmma_accumulator_load, qk_ref, wait_n=1)

    def next_qk(self, qk_ref: Any, *, n: Any, add: Callable[[], None]) -> jax.Array:
        self.multiply(qk_ref, n, self.worker)
        add()
        return plgpu.wgmma_accumulator_load(qk_ref)

    def d_logits(
        self, qk: Callable[[], jax.Array], d_weights_ref: Any, *, i: Any, slot: Any, masked: bool, d_v_ref: Any
    ) -> jax.Array:
        """Gradients of the logits of a block; also accumulates the weights into the gradient of the values."""
        memory, worker, dtype = self.program.memory, self.worker, self.program.memory.v.dtype
        d_out = memory.d_out.at[slot]
        plgpu.wgmma(d_weights_ref, memory.v.at[worker], d_out.transpose((1, 0)))
        weights_DC, slope_DC = self.weights(qk(), i=i, slot=slot, block=worker, masked=masked)
        plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), d_out)
        d_weights_DC = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
        d_logits_DC = weights_DC * self.subtract_mean(d_weights_DC, slot)
        return (d_logits_DC if slope_DC is None else d_logits_DC * slope_DC).astype(dtype)

    def d_queries(self, part_ref: Any, d_logits: Any) -> None:
        """This warpgroup's part of the gradient of a step's queries, from all keys of the program."""
        for other in range(WORKERS):
            if self.program.sizes.is_split_by_query:
                lhs = d_logits.at[other, :, pl.ds(self.worker * ROWS, ROWS)]
                rhs = self.program.memory.k.at[other, 0]
            else:
                lhs, rhs = d_logits.at[other], self.program.memory.k.at[other, self.worker]
            plgpu.wgmma(part_ref, lhs.transpose((1, 0)), rhs)

    def add(self, part_ref: Any, i: Any, head: Any, *, behind: int) -> None:
        """Add a part to the gradient of the queries; `behind`: matmuls issued after its own."""
        program, sizes, worker = self.program, self.program.sizes, self.worker
        part = plgpu.wgmma_accumulator_load(part_ref, wait_n=behind)
        of_sequence = program.d_q_ref.at[program.position[0]]
        if sizes.is_split_by_query:
            target = of_sequence.at[pl.ds(i * sizes.C + worker * ROWS, ROWS), head]
        else:
            target = of_sequence.at[pl.ds(i * sizes.C, ROWS), head, pl.ds(worker * sizes.columns, sizes.columns)]
        self.add_to_queries(part, worker, target, in_flight=0)
