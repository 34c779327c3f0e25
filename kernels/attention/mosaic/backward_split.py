"""The backward kernel with 64 keys for each warpgroup.

The gradients of the logits also go through shared memory, from where both warpgroups read those of all 128 keys and
compute one half each of the gradient of the queries.

If registers allow, the matmul of the next step's logits is started behind those of this step's gradients, to keep the
tensor cores busy between loop iterations.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Ranges
from maxhydra.kernels.attention.mosaic.backward_program import Worker
from maxhydra.kernels.attention.mosaic.common import fold_blocks
from maxhydra.kernels.mosaic import ROWS, WORKERS, slot_of


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
                left = d_logits.at[other, :, pl.ds(self.worker * ROWS, ROWS)]
                right = self.program.memory.k.at[other, 0]
            else:
                left, right = d_logits.at[other], self.program.memory.k.at[other, self.worker]
            plgpu.wgmma(part_ref, left.transpose((1, 0)), right)

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
