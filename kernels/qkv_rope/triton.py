"""The gradients of query, key and value, turned back and joined into that of their product: for GPUs, in Pallas for
Triton.

XLA takes two kernels for that, which read and write parts of what they take. Here a program takes one head of some
tokens. Forward, XLA splits the product and turns its parts as fast as memory goes.

Shapes: M tokens, N query heads, K key and value heads, A = N + 2K heads of the product, H head size.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.qkv_rope import reference
from maxhydra.kernels.tiles import Sizes, candidates, resized


class Tile(NamedTuple):
    """What a program takes, and how."""

    tokens: int
    warps: int


# The fastest of those measured on an H200.
MEASURED = Tile(64, 8)
# Worth a trial on other heads and cards.
TRIED = (Tile(32, 4), Tile(64, 4), Tile(128, 8), Tile(32, 8))
# Tiles are cut to what divides the tokens, and smaller ones than this waste time.
MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class How:
    """What is known when the kernels are compiled."""

    num_heads: int
    num_kv_heads: int
    tile: Tile
    interpret: bool

    @property
    def ends(self) -> tuple[int, int, int]:
        """Heads of the product before the end of queries, keys, values."""
        N, K = self.num_heads, self.num_kv_heads
        return N, N + K, N + 2 * K


def cut(tokens: int) -> dict[str, int]:
    """What the sizes of the tile must divide, by name."""
    return {"tokens": tokens}


def tried(tokens: int) -> dict[str, list[dict[str, int]]]:
    """Sizes to try."""
    return candidates({"": TRIED}, MEASURED, cut(tokens))


def qkv_rope(
    heads_MAH: jax.Array,
    cos_MF: jax.Array,
    sin_MF: jax.Array,
    *,
    num_heads: int,
    num_kv_heads: int,
    tile: Tile = MEASURED,
    sizes: Sizes = (),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return _rotated(How(num_heads, num_kv_heads, resized(tile, sizes), interpret), heads_MAH, cos_MF, sin_MF)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotated(
    how: How, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reference.qkv_rope(heads_MAH, cos_MF, sin_MF, num_heads=how.num_heads, num_kv_heads=how.num_kv_heads)


def _forward(
    how: How, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    return _rotated(how, heads_MAH, cos_MF, sin_MF), (cos_MF, sin_MF)


def _backward(how: How, kept: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, ...]) -> tuple:
    """Positions are not learned."""
    M, _, H = cotangents[0].shape
    tokens = math.gcd(how.tile.tokens, M)
    d_heads_MAH = pl.pallas_call(
        partial(_join_kernel, how=how, tokens=tokens),
        grid=(M // tokens, how.ends[2]),
        out_shape=jax.ShapeDtypeStruct((M, how.ends[2], H), cotangents[0].dtype),
        compiler_params=plt.CompilerParams(num_warps=how.tile.warps, num_stages=1),
        interpret=how.interpret,
        name="rotated_heads",
    )(*cotangents, *kept)
    return d_heads_MAH, None, None


_rotated.defvjp(_forward, _backward)


def _join_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, cos_ref: Any, sin_ref: Any, heads_ref: Any, *, how: How, tokens: int
) -> None:
    """A turn is undone by a turn the other way, which is its transpose too."""
    rows, head = pl.ds(pl.program_id(0) * tokens, tokens), pl.program_id(1)
    for ref, first, end in zip((q_ref, k_ref, v_ref), (0, *how.ends), how.ends, strict=False):

        @pl.when((head >= first) & (head < end))
        def _(ref: Any = ref, first: int = first) -> None:
            half = heads_ref.shape[2] // 2
            a, b = (ref[rows, head - first, pl.ds(start, half)].astype(jnp.float32) for start in (0, half))
            if ref is not v_ref:
                cos, sin = cos_ref[rows], sin_ref[rows]
                a, b = a * cos + b * sin, b * cos - a * sin
            heads_ref[rows, head, pl.ds(0, half)] = a.astype(heads_ref.dtype)
            heads_ref[rows, head, pl.ds(half, half)] = b.astype(heads_ref.dtype)
