"""What the backward kernel holds in shared memory, and the barriers that say when."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic.params import Tile
from maxhydra.kernels.mosaic import ROWS, WORKERS, memory

# The gradients of 64 keys and of their values are two sums in the registers of one warpgroup up to this head size.
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
        """Whether both warpgroups work on the same keys, or on 64 each."""
        return self.H > OWN_KEYS

    @property
    def blocks(self) -> int:
        """Of a program's keys, 64 each."""
        return 1 if self.is_shared else WORKERS

    @property
    def keys(self) -> int:
        return self.blocks * ROWS

    @property
    def block(self) -> tuple[int, int]:
        return ROWS, self.C

    @property
    def is_split_by_query(self) -> bool:
        """Whether a warpgroup makes the gradient of half of the queries of a step, or half of the gradient of each."""
        return self.C == WORKERS * ROWS

    @property
    def columns(self) -> int:
        """Of the gradient of the queries that a warpgroup makes at a time."""
        return self.H // self.parts

    @property
    def parts(self) -> int:
        if self.is_shared:
            # One of which fits into a warpgroup's registers beside the gradient of keys or values.
            return self.H // ROWS
        return 1 if self.is_split_by_query else WORKERS

    @property
    def rooms(self) -> int:
        """For what is added to the gradient of the queries."""
        return WORKERS + self.is_shared

    @property
    def is_ahead(self) -> bool:
        """Whether a step begins the product of the next, which blocks of so few queries leave registers for."""
        return self.C == ROWS

    @property
    def d_out_stages(self) -> int:
        return 1 if self.is_shared else self.stages

    @property
    def buffers(self) -> int:
        """Of the gradients of the logits: where each warpgroup has its own keys, a block is written while the other may
        still read that of the step before."""
        return 1 if self.is_shared else 2


class Memory(NamedTuple):
    k: Any
    v: Any
    q: Any
    d_out: Any
    rows: Any
    """Of each stage the sums of exponentials, then of each stage the means; as one, since each array begins at a
    multiple of 1,024 bytes, of which segments leave none."""
    weights: Any
    """From the warpgroup that makes them to the other; None where each has its own keys."""
    d_logits: Any
    d_q: Any
    segments: Any
    """Of the queries of each stage, then of the keys; as one too."""

    @classmethod
    def of(cls, sizes: Sizes, dtype: Any, *, is_tagged: bool) -> "Memory":
        H, moving, d_out = sizes.H, (sizes.stages, sizes.C), (sizes.d_out_stages, sizes.C)
        return cls(
            k=memory(sizes.blocks, sizes.parts, ROWS, sizes.columns, dtype=dtype),
            v=memory(sizes.blocks, ROWS, H, dtype=dtype),
            q=memory(*moving, H, dtype=dtype),
            d_out=memory(*d_out, H, dtype=dtype),
            rows=plgpu.SMEM((sizes.stages + sizes.d_out_stages, sizes.C), jnp.float32),
            weights=memory(*sizes.block, dtype=dtype) if sizes.is_shared else None,
            d_logits=memory(sizes.buffers, sizes.blocks, *sizes.block, dtype=dtype),
            d_q=memory(sizes.rooms, ROWS, sizes.columns, dtype=jnp.float32),
            segments=plgpu.SMEM((sizes.stages * sizes.C + sizes.keys,), jnp.int32) if is_tagged else None,
        )


class Barriers(NamedTuple):
    """Of what has arrived in shared memory, and of what may be written over."""

    kv_here: Any
    q_here: Any
    d_out_here: Any
    q_free: Any
    d_out_free: Any
    weights_here: Any
    d_logits_here: Any

    @classmethod
    def of(cls, sizes: Sizes, *, is_tagged: bool) -> "Barriers":
        copies = 1 + sizes.parts + is_tagged
        return cls(
            kv_here=plgpu.Barrier(num_arrivals=copies, num_barriers=sizes.blocks),
            q_here=plgpu.Barrier(num_arrivals=2 + is_tagged, num_barriers=sizes.stages),
            d_out_here=plgpu.Barrier(num_arrivals=2, num_barriers=sizes.d_out_stages),
            q_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.stages),
            d_out_free=plgpu.Barrier(num_arrivals=WORKERS, num_barriers=sizes.d_out_stages),
            weights_here=plgpu.Barrier() if sizes.is_shared else None,
            d_logits_here=plgpu.Barrier(num_arrivals=1 if sizes.is_shared else WORKERS),
        )
