"""Tile geometry, shared memory and barriers of the backward kernel."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic import Tile
from maxhydra.kernels.mosaic import ROWS, WORKERS, shared_memory

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
