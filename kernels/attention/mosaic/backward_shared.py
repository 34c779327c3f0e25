"""The backward kernel where both warpgroups work on the same 64 keys, since the gradients of keys and values of such
heads are more than the registers of one.

One makes the weights and adds up the gradient of the values, the other makes the gradients of the logits and adds up
that of the keys. The gradient of the queries comes in four parts: the first warpgroup, which has the softmax to make,
takes one (with two each, 16 heads over 8 with a soft-cap, batch 2, 4,096 tokens, take 2.36 ms on an H200 instead of
1.97; with two programs that load their queries together, 2.31).

What one makes for the other goes through shared memory once a step each way, and what they say so with also says that
the memory may be written again: the weights of a step come when their warpgroup has read the gradients of the logits of
the step before, and those when the weights have been read.

The first begins the product of the next step's logits behind its part, so that the matrix unit has work while the loop
turns.
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
from maxhydra.kernels.attention.mosaic.common import MATRIX, over
from maxhydra.kernels.mosaic import ROWS, slot_of

# The one block of keys, and the one place of the gradient of the outputs.
ONE = 0


class _Together(Worker):
    parts: ClassVar[tuple[int, ...]]
    """Of the gradient of the queries."""
    rooms: ClassVar[tuple[int, ...]]
    """From where they are added, in turn."""

    @property
    def keys(self) -> tuple[Any, Any, Any]:
        """Their place in what is written for them."""
        b, k, start = self.program.place
        return b, pl.ds(start, ROWS), k

    def over_heads(self, act: Callable[..., Any], so_far: Any) -> Any:
        G, k = self.program.sizes.G, self.program.place[1]
        return jax.lax.fori_loop(0, G, lambda g, so_far: act(so_far, head=k * G + g), so_far)

    def d_queries(self, part_ref: Any, which: int) -> None:
        memory = self.program.memory
        plgpu.wgmma(part_ref, memory.d_logits.at[0, ONE].transpose((1, 0)), memory.k.at[ONE, self.parts[which]])

    def add(self, part_ref: Any, which: int, i: Any, head: Any, *, behind: int) -> None:
        """With so many products begun behind it."""
        program, columns = self.program, self.program.sizes.columns
        of_sequence = program.d_q_ref.at[program.place[0]]
        to = of_sequence.at[pl.ds(i * ROWS, ROWS), head, pl.ds(self.parts[which] * columns, columns)]
        part = plgpu.wgmma_accumulator_load(part_ref, wait_n=behind)
        room = self.rooms[which % len(self.rooms)]
        self.add_to_queries(part, room, to, on_their_way=min(which, len(self.rooms) - 1))

    def others(self, i: Any, head: Any) -> None:
        """The parts behind the first."""

        def one(part_ref: Any, *, which: int) -> None:
            self.d_queries(part_ref, which)
            self.add(part_ref, which, i, head, behind=0)

        for which in range(1, len(self.parts)):
            self.scoped_part(partial(one, which=which))

    def scoped_part(self, act: Callable[[Any], Any]) -> Any:
        return pl.run_scoped(act, plgpu.ACC((ROWS, self.program.sizes.columns), jnp.float32))


@dataclasses.dataclass(frozen=True)
class OfValues(_Together):
    parts = (0,)
    rooms = (0,)

    def run(self, ranges: Ranges) -> None:
        program = self.program
        self.begin(ONE)

        def total(d_v_ref: Any) -> jax.Array:
            def of_head(so_far: Any, *, head: Any) -> Any:
                step = partial(self.step, head=head, d_v_ref=d_v_ref)
                return over(ranges, step, so_far, program.how, is_tagged=program.is_tagged, backwards=False)

            self.over_heads(of_head, (jnp.int32(0), self.first_product(ONE)))
            return plgpu.wgmma_accumulator_load(d_v_ref)

        d_v_DH = pl.run_scoped(total, plgpu.ACC((ROWS, program.sizes.H), jnp.float32))
        # The last gradients of the logits were made with the values.
        self.write(d_v_DH, program.memory.v.at[ONE], program.d_v_ref.at[self.keys])
        plgpu.wait_smem_to_gmem(0)

    def step(self, i: Any, so_far: Any, *, masked: bool, head: Any, d_v_ref: Any) -> Any:
        (n, product_DC), memory, barriers = so_far, self.program.memory, self.program.barriers
        sizes, dtype = self.program.sizes, memory.v.dtype
        slot = slot_of(n, sizes.stages)
        weights_DC, slope_DC = self.weights(product_DC, i=i, slot=slot, block=ONE, masked=masked)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        memory.weights[...] = (weights_DC if slope_DC is None else weights_DC * slope_DC).astype(dtype)
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.weights_here)
        plgpu.barrier_wait(barriers.d_out_here.at[ONE])
        plgpu.wgmma(d_v_ref, weights_DC.astype(dtype), memory.d_out.at[ONE])
        # What it has read would take registers from what comes next.
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(barriers.d_out_free.at[ONE])
        plgpu.barrier_wait(barriers.d_logits_here)

        def finish(part_ref: Any) -> jax.Array:
            self.d_queries(part_ref, 0)
            plgpu.barrier_wait(barriers.q_here.at[slot_of(n + 1, sizes.stages)])
            return self.scoped(partial(next_product, part_ref))

        def next_product(part_ref: Any, product_ref: Any) -> jax.Array:
            self.multiply(product_ref, n + 1, ONE)
            self.add(part_ref, 0, i, head, behind=sizes.parts)
            self.others(i, head)
            return plgpu.wgmma_accumulator_load(product_ref)

        return n + 1, self.scoped_part(finish)


@dataclasses.dataclass(frozen=True)
class OfKeys(_Together):
    parts = (1, 2, 3)
    rooms = (1, 2)

    def run(self, ranges: Ranges) -> None:
        program, sizes = self.program, self.program.sizes
        self.begin(ONE)

        def total(d_k_ref: Any) -> tuple[jax.Array, Any]:
            def of_head(n: Any, *, head: Any) -> Any:
                # One loop, since what is hidden has no weight already.
                return jax.lax.fori_loop(ranges.first, ranges.last, partial(self.step, head=head, d_k_ref=d_k_ref), n)

            n = self.over_heads(of_head, jnp.int32(0))
            return plgpu.wgmma_accumulator_load(d_k_ref), n

        d_k_DH, n = pl.run_scoped(total, plgpu.ACC((ROWS, sizes.H), jnp.float32))
        # The last queries are not needed any more; those loaded in vain may still come, to the other place.
        room = program.memory.q.at[slot_of(n + 1, sizes.stages)]
        self.write(d_k_DH * program.how.request.scale, room, program.d_k_ref.at[self.keys])
        plgpu.wait_smem_to_gmem(0)

    def step(self, i: Any, n: Any, *, head: Any, d_k_ref: Any) -> Any:
        memory, barriers, dtype = self.program.memory, self.program.barriers, self.program.memory.v.dtype
        slot = slot_of(n, self.program.sizes.stages)
        plgpu.barrier_wait(barriers.d_out_here.at[ONE])
        d_weights_DC = self.less_mean(self.scoped(self.d_weights), ONE)
        plgpu.barrier_arrive(barriers.d_out_free.at[ONE])
        plgpu.barrier_wait(barriers.weights_here)
        weights_DC = plgpu.layout_cast(memory.weights[...], MATRIX).astype(jnp.float32)
        d_logits_DC = (weights_DC * d_weights_DC).astype(dtype)
        memory.d_logits[0, ONE] = d_logits_DC
        plgpu.commit_smem()
        plgpu.barrier_arrive(barriers.d_logits_here)
        plgpu.barrier_wait(barriers.q_here.at[slot])

        def first(part_ref: Any) -> None:
            self.d_queries(part_ref, 0)
            plgpu.wgmma(d_k_ref, d_logits_DC, memory.q.at[slot])
            self.add(part_ref, 0, i, head, behind=1)

        self.scoped_part(first)
        self.others(i, head)
        plgpu.barrier_arrive(barriers.q_free.at[slot])
        return n + 1

    def d_weights(self, d_weights_ref: Any) -> jax.Array:
        memory = self.program.memory
        plgpu.wgmma(d_weights_ref, memory.v.at[ONE], memory.d_out.at[ONE].transpose((1, 0)))
        return plgpu.wgmma_accumulator_load(d_weights_ref)
