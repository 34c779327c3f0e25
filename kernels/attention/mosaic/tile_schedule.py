"""The order in which the forward kernel processes tiles of queries, and their assignment to programs."""

import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic import KernelParams
from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.mosaic import ROWS, WORKERS

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
        for start in range(0, self.T, TILE):
            first, stop = 0, start + TILE if request.causal else self.S
            if request.window is not None:
                first = max(0, start - request.window + 1)
            if request.chunk is not None:
                first = start // request.chunk * request.chunk
            costs.append(stop // self.D - first // self.D + 1)
        return costs


def _divided(a: Any, b: int) -> tuple[Any, Any]:
    return jax.lax.div(a, jnp.int32(b)), jax.lax.rem(a, jnp.int32(b))
