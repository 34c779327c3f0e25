"""The order in which the forward kernel takes tiles of queries, and which program takes which."""

import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.attention.blocks import Inputs
from maxhydra.kernels.attention.mosaic.params import How
from maxhydra.kernels.attention.spec import Request
from maxhydra.kernels.mosaic import ROWS, WORKERS

# Queries of a tile.
TILE = WORKERS * ROWS
# Keys and values of the heads that are worked on at a time should stay in the cache, half of Hopper's.
CACHE_BYTES = 24 * 2**20


class Plan(NamedTuple):
    """Tiles are numbered by heads that stay together, then the last queries first, as they take longest, then heads."""

    T: int
    S: int
    N: int
    G: int
    H: int
    D: int
    stages: int
    heads: int
    """Of all sequences."""
    together: int
    """Heads whose tiles are taken before those of others."""

    @classmethod
    def of(cls, inputs: Inputs, how: How) -> "Plan":
        (B, T, N, H), (_, S, K, _) = inputs.q_BTNH.shape, inputs.k_BSKH.shape
        G, tile = N // K, how.tiles.forward
        fit = max(1, CACHE_BYTES // (2 * S * H * inputs.k_BSKH.dtype.itemsize))
        together = max(n for n in range(1, min(fit, B * K) + 1) if B * K % n == 0)
        return cls(T, S, N, G, H, math.gcd(tile.size, S), tile.stages, B * N, together * G)

    @property
    def blocks(self) -> int:
        """Tiles of a head."""
        return self.T // TILE

    def place(self, tile: Any) -> tuple[Any, Any, Any]:
        """Sequence, head and first query of a tile."""
        part, tile = _divided(tile, self.blocks * self.together)
        block, head = _divided(tile, self.together)
        b, n = _divided(part * self.together + head, self.N)
        return b, n, (self.blocks - 1 - block) * TILE

    def schedule(self, how: How) -> np.ndarray:
        """How many tiles each program has, and which: the next goes to the one that has least to do."""
        tiles, costs = self.heads * self.blocks, self._costs(how.request)
        programs = min(how.programs, tiles)
        dealt: list[list[int]] = [[] for _ in range(programs)]
        busy = [(0, program) for program in range(programs)]
        for tile in range(tiles):
            so_far, program = heapq.heappop(busy)
            dealt[program].append(tile)
            block = self.blocks - 1 - tile % (self.blocks * self.together) // self.together
            heapq.heappush(busy, (so_far + costs[block], program))
        most = max(map(len, dealt))
        return np.array([[len(row), *row, *[0] * (most - len(row))] for row in dealt], np.int32)

    def _costs(self, request: Request) -> list[int]:
        """Blocks of keys that a tile sees, and one more for its beginning and end."""
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
