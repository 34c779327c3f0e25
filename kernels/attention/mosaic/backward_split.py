"""The backward kernel where each warpgroup has 64 keys of its own.

The gradients of the logits also go through shared memory, where both warpgroups find those of all 128 keys, and make a
half each of what these add to the gradient of the queries.

Where registers allow, the product of the next step's logits is begun behind those of this one's gradients, so that the
matrix unit has work while the loop turns.
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
from maxhydra.kernels.attention.mosaic.common import over
from maxhydra.kernels.mosaic import ROWS, WORKERS, slot_of


@dataclasses.dataclass(frozen=True)
class Apart(Worker):
    """A warpgroup with its keys."""

    def run(self, ranges: Ranges) -> None:
        program, memory, worker = self.program, self.program.memory, self.worker
        self.begin(worker)
        d_k_DH, d_v_DH = self.gradients(ranges)
        (b, k, start), scale = program.place, program.how.request.scale
        keys = pl.ds(start + worker * ROWS, ROWS)
        # The values are not needed any more.
        for gradient, ref in ((d_v_DH, program.d_v_ref), (d_k_DH * scale, program.d_k_ref)):
            self.write(gradient, memory.v.at[worker], ref.at[b, keys, k])
        plgpu.wait_smem_to_gmem(0)

    def gradients(self, ranges: Ranges) -> tuple[jax.Array, jax.Array]:
        """Of the keys, still without the scale, and the values."""
        program, sizes, k = self.program, self.program.sizes, self.program.place[1]

        def sums(d_k_ref: Any, d_v_ref: Any) -> tuple[jax.Array, jax.Array]:
            def of_head(g: Any, so_far: Any) -> Any:
                step = partial(self.step, head=k * sizes.G + g, sums=(d_k_ref, d_v_ref))
                return over(ranges, step, so_far, program.how, is_tagged=program.is_tagged, backwards=False)

            product_DC = self.first_product(self.worker) if sizes.is_ahead else None
            jax.lax.fori_loop(0, sizes.G, of_head, (jnp.int32(0), product_DC))
            return plgpu.wgmma_accumulator_load(d_k_ref), plgpu.wgmma_accumulator_load(d_v_ref)

        of_keys = plgpu.ACC((ROWS, sizes.H), jnp.float32)
        return pl.run_scoped(sums, of_keys, of_keys)

    def step(self, i: Any, so_far: Any, *, masked: bool, head: Any, sums: tuple[Any, Any]) -> Any:
        (n, product_DC), (d_k_ref, d_v_ref) = so_far, sums
        sizes, barriers, memory = self.program.sizes, self.program.barriers, self.program.memory
        slot, d_logits = slot_of(n, sizes.stages), memory.d_logits.at[slot_of(n, sizes.buffers)]
        of_block = partial(self.d_logits, i=i, slot=slot, masked=masked, d_v_ref=d_v_ref)
        if sizes.is_ahead:
            plgpu.barrier_wait(barriers.d_out_here.at[slot])
            d_logits_DC = self.scoped(partial(of_block, lambda: product_DC))
        else:
            plgpu.barrier_wait(barriers.q_here.at[slot])
            plgpu.barrier_wait(barriers.d_out_here.at[slot])
            d_logits_DC = self.scoped(lambda product_ref: self.scoped(partial(of_block, self.product(product_ref, n))))
        d_logits[self.worker] = d_logits_DC
        plgpu.commit_smem()
        if sizes.is_ahead:
            # What the gradient of the values has read would take registers from what comes next.
            plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.d_logits_here)
        plgpu.barrier_wait(barriers.d_logits_here)

        def finish(part_ref: Any) -> jax.Array | None:
            self.d_queries(part_ref, d_logits)
            plgpu.wgmma(d_k_ref, d_logits_DC, memory.q.at[slot])
            # While the gradient of the keys and the next product are made.
            add = partial(self.add, part_ref, i, head)
            if not sizes.is_ahead:
                return add(behind=1)
            plgpu.barrier_wait(barriers.q_here.at[slot_of(n + 1, sizes.stages)])
            return self.scoped(partial(self.next_product, n=n + 1, add=partial(add, behind=1 + sizes.parts)))

        product_DC = pl.run_scoped(finish, plgpu.ACC((ROWS, sizes.columns), jnp.float32))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        plgpu.barrier_arrive(barriers.d_out_free.at[slot])
        return n + 1, product_DC

    def product(self, product_ref: Any, n: Any) -> Callable[[], jax.Array]:
        """Begun now, waited for when another has been begun behind it."""
        self.multiply(product_ref, n, self.worker)
        return partial(plgpu.wgmma_accumulator_load, product_ref, wait_n=1)

    def next_product(self, product_ref: Any, *, n: Any, add: Callable[[], None]) -> jax.Array:
        self.multiply(product_ref, n, self.worker)
        add()
        return plgpu.wgmma_accumulator_load(product_ref)

    def d_logits(
        self, product: Callable[[], jax.Array], d_weights_ref: Any, *, i: Any, slot: Any, masked: bool, d_v_ref: Any
    ) -> jax.Array:
        """Gradients of the logits of a block; on the way the weights are added up into that of the values."""
        memory, worker, dtype = self.program.memory, self.worker, self.program.memory.v.dtype
        d_out = memory.d_out.at[slot]
        plgpu.wgmma(d_weights_ref, memory.v.at[worker], d_out.transpose((1, 0)))
        weights_DC, slope_DC = self.weights(product(), i=i, slot=slot, block=worker, masked=masked)
        plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), d_out)
        d_weights_DC = plgpu.wgmma_accumulator_load(d_weights_ref, wait_n=1)
        d_logits_DC = weights_DC * self.less_mean(d_weights_DC, slot)
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

    def add(self, part_ref: Any, i: Any, head: Any, *, behind: int) -> None:
        """With so many products begun behind it."""
        program, sizes, worker = self.program, self.program.sizes, self.worker
        part = plgpu.wgmma_accumulator_load(part_ref, wait_n=behind)
        of_sequence = program.d_q_ref.at[program.place[0]]
        if sizes.is_split_by_query:
            to = of_sequence.at[pl.ds(i * sizes.C + worker * ROWS, ROWS), head]
        else:
            to = of_sequence.at[pl.ds(i * sizes.C, ROWS), head, pl.ds(worker * sizes.columns, sizes.columns)]
        self.add_to_queries(part, worker, to, on_their_way=0)
