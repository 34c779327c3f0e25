"""Shared by the forward and backward kernels: logits, masks, loops over blocks, and register layouts.

`TilePlan` is the order in which the forward kernel processes tiles of queries, and their assignment to programs.
"""

import heapq
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from maxhydra.kernels.attention.blocks import LOG2E, Inputs, Ranges, visible_mask
from maxhydra.kernels.attention.mosaic import KernelParams
from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.mosaic import ROWS, WORKERS

# Register layouts of a wgmma accumulator, and of one number per row or column of it.
MATRIX = plgpu.Layout.WGMMA
COLUMN, ROW = MATRIX.reduce(1), MATRIX.reduce(0)
COMPILER_PARAMS = plgpu.CompilerParams(approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup)


def zeros(*shape: int, layout: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.full(shape, 0, jnp.float32), layout)


def down(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast one number per row."""
    return jax.lax.broadcast_in_dim(values, shape, [0])


def across(values: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Broadcast one number per column."""
    return jax.lax.broadcast_in_dim(values, shape, [1])


def logits(qk: jax.Array, request: Request) -> tuple[jax.Array, float, jax.Array | None]:
    """Logits, the factor to units of log 2, and the logits' derivative by scale * qk (None: one)."""
    if request.softcap is None:
        return qk, request.scale * LOG2E, None
    # tanh computed from 2^x: its absolute error is that of a number near one, so the logits' error is some 1e-7 of the
    # cap. A division takes more instructions than the square of an inverse square root.
    root = jax.lax.rsqrt(1 + jnp.exp2(qk * (2 * LOG2E * request.scale / request.softcap)))
    tanh = 1 - 2 * root * root
    return tanh, request.softcap * LOG2E, 1 - tanh * tanh


def mask_with(
    fill: float, values: jax.Array, request: Request, first: tuple[Any, Any], segments: Any, *, query_axis: int
) -> jax.Array:
    """Replace the values of masked pairs by `fill`; `first`: first query and key of the block."""
    shape = values.shape
    iota = partial(plgpu.broadcasted_iota, jnp.int32, shape, layout=MATRIX)
    q, k = iota(query_axis) + first[0], iota(1 - query_axis) + first[1]
    q_segments = kv_segments = None
    if segments is not None:
        spread = (down, across) if query_axis == 0 else (across, down)
        q_segments, kv_segments = (broadcast(ids, shape) for broadcast, ids in zip(spread, segments, strict=True))
    return jnp.where(visible_mask(request, q, k, q_segments, kv_segments), values, fill)


def shared_segment_ranges(of_rows_BR: jax.Array, of_columns_BC: jax.Array, *, rows: int, columns: int) -> jax.Array:
    """For each block of rows, the range of blocks of columns that may share a segment with it, [B, blocks, 2].

    Computed from the smallest and largest segment of each block, so blocks in the range may still share none.
    """
    smallest, largest = [], []
    for segments, size in ((of_rows_BR, rows), (of_columns_BC, columns)):
        blocks = segments.reshape(segments.shape[0], -1, size)
        smallest.append(jnp.where(blocks == 0, jnp.iinfo(jnp.int32).max, blocks).min(axis=2))
        largest.append(blocks.max(axis=2))
    is_shared_pair = (smallest[0][:, :, None] <= largest[1][:, None, :]) & (
        smallest[1][:, None, :] <= largest[0][:, :, None]
    )
    first, beyond = (
        jnp.argmax(is_shared_pair, axis=2),
        is_shared_pair.shape[2] - jnp.argmax(is_shared_pair[:, :, ::-1], axis=2),
    )
    return jnp.stack([first, jnp.where(is_shared_pair.any(axis=2), beyond, first)], axis=2).astype(jnp.int32)


def clip_ranges(ranges: Ranges, segment_ranges_ref: Any, b: Any, block: Any) -> Ranges:
    """Shrink the ranges to blocks that may share a segment; all remaining blocks are masked."""
    first = jnp.maximum(ranges.first, segment_ranges_ref[b, block, 0])
    last = jnp.maximum(jnp.minimum(ranges.last, segment_ranges_ref[b, block, 1]), first)
    return Ranges(first, last, last, last)


def fold_blocks(
    ranges: Ranges, step: Callable[..., Any], carry: Any, params: KernelParams, *, has_segments: bool, backwards: bool
) -> Any:
    """Fold the step over all blocks, masked where needed; loops that are statically empty are omitted.

    Forwards iterates over queries, where causality masks the first blocks, backwards over keys, where it masks the
    last.
    """
    request = params.request
    before, inside, after = (
        (ranges.first, ranges.whole, True),
        (ranges.whole, ranges.broken, False),
        (ranges.broken, ranges.last, True),
    )
    if has_segments:
        loops = [(ranges.first, ranges.last, True)]
    elif request.window is not None or request.chunk is not None:
        loops = [before, inside, after]
    elif not request.causal:
        loops = [inside]
    else:
        loops = [inside, after] if backwards else [before, inside]
    for start, stop, masked in reversed(loops) if backwards else loops:
        body = partial(_down, stop, step) if backwards else partial(_up, start, step)
        carry = jax.lax.fori_loop(0, stop - start, partial(body, masked=masked), carry)
    return carry


def _up(start: Any, step: Callable[..., Any], n: Any, carry: Any, *, masked: bool) -> Any:
    return step(start + n, carry, masked=masked)


def _down(stop: Any, step: Callable[..., Any], n: Any, carry: Any, *, masked: bool) -> Any:
    return step(stop - 1 - n, carry, masked=masked)


# Queries of a tile.
TILE = WORKERS * ROWS
# Keys and values of the heads in progress should stay in L2: half of Hopper's cache.
CACHE_BYTES = 24 * 2**20


class TilePlan(NamedTuple):
    """Tile numbering: by group of heads, then by queries, the last (longest) first, then by head within the group."""

    T: int
    S: int
    N: int
    G: int
    H: int
    D: int
    stages: int
    heads: int
    """Heads of all sequences."""
    group_size: int
    """Heads of a group, whose tiles are processed before those of other groups."""

    @classmethod
    def of(cls, inputs: Inputs, params: KernelParams) -> "TilePlan":
        (B, T, N, H), (_, S, K, _) = inputs.q_BTNH.shape, inputs.k_BSKH.shape
        G, tile = N // K, params.tiles.forward
        fit = max(1, CACHE_BYTES // (2 * S * H * inputs.k_BSKH.dtype.itemsize))
        group_size = max(n for n in range(1, min(fit, B * K) + 1) if B * K % n == 0)
        return cls(T, S, N, G, H, math.gcd(tile.size, S), tile.stages, B * N, group_size * G)

    @property
    def blocks(self) -> int:
        """Tiles of a head."""
        return self.T // TILE

    def position(self, tile: Any) -> tuple[Any, Any, Any]:
        """Sequence, head and first query of a tile."""
        part, tile = _divided(tile, self.blocks * self.group_size)
        block, head = _divided(tile, self.group_size)
        b, n = _divided(part * self.group_size + head, self.N)
        return b, n, (self.blocks - 1 - block) * TILE

    def schedule(self, params: KernelParams) -> np.ndarray:
        """[programs, 1 + max tiles]: the number of tiles of each program and the tiles; greedy by least load."""
        tiles, costs = self.heads * self.blocks, self._costs(params.request)
        programs = min(params.programs, tiles)
        assigned: list[list[int]] = [[] for _ in range(programs)]
        loads = [(0, program) for program in range(programs)]
        for tile in range(tiles):
            load, program = heapq.heappop(loads)
            assigned[program].append(tile)
            block = self.blocks - 1 - tile % (self.blocks * self.group_size) // self.group_size
            heapq.heappush(loads, (load + costs[block], program))
        max_tiles = max(map(len, assigned))
        return np.array([[len(row), *row, *[0] * (max_tiles - len(row))] for row in assigned], np.int32)

    def _costs(self, request: Request) -> list[int]:
        """Cost of a head's tiles: blocks of keys that a tile sees, and one more for its prologue and epilogue."""
        costs = []
        for start in range(request.offset, request.offset + self.T, TILE):
            first, stop = 0, start + TILE if request.causal else self.S
            if request.window is not None:
                first = max(0, start - request.window + 1)
            if request.chunk is not None:
                first = start // request.chunk * request.chunk
            costs.append(stop // self.D - first // self.D + 1)
        return costs


def _divided(a: Any, b: int) -> tuple[Any, Any]:
    return jax.lax.div(a, jnp.int32(b)), jax.lax.rem(a, jnp.int32(b))
