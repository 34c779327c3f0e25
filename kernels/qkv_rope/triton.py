"""The backward pass of `qkv_rope` for GPUs, in Pallas for Triton: unrotate and concatenate the gradients of q, k and v.

XLA uses two kernels for this, which read and write parts of their arrays. Here a program handles one head of some
tokens. In the forward pass, XLA splits the projection and rotates its parts at memory bandwidth.

Shapes: M tokens, N query heads, K key and value heads, A = N + 2K heads of the projection, H head size.
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
from maxhydra.kernels.tiles import Sizes, candidates, override_sizes


class Tile(NamedTuple):
    """Tokens and warps of a program."""

    tokens: int
    warps: int


# The fastest measured on an H200.
MEASURED = Tile(64, 8)
# Candidates for other heads and GPUs.
CANDIDATE_TILES = (Tile(32, 4), Tile(64, 4), Tile(128, 8), Tile(32, 8))
# Tiles are reduced to a divisor of the number of tokens; smaller ones than this are slow.
TOKEN_MULTIPLE = 16


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernel."""

    num_heads: int
    num_kv_heads: int
    tile: Tile
    interpret: bool

    @property
    def ends(self) -> tuple[int, int, int]:
        """Indices after the last query, key and value head of the projection."""
        N, K = self.num_heads, self.num_kv_heads
        return N, N + K, N + 2 * K


def tile_extents(tokens: int) -> dict[str, int]:
    """The extent that each tile size must divide, by name."""
    return {"tokens": tokens}


def candidate_tiles(tokens: int) -> dict[str, list[dict[str, int]]]:
    """Candidate tile sizes."""
    return candidates({"": CANDIDATE_TILES}, MEASURED, tile_extents(tokens))


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
    return _rotated(
        KernelParams(num_heads, num_kv_heads, override_sizes(tile, sizes), interpret), heads_MAH, cos_MF, sin_MF
    )


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotated(
    params: KernelParams, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    return reference.qkv_rope(heads_MAH, cos_MF, sin_MF, num_heads=params.num_heads, num_kv_heads=params.num_kv_heads)


def _forward(
    params: KernelParams, heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array
) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    return _rotated(params, heads_MAH, cos_MF, sin_MF), (cos_MF, sin_MF)


def _backward(params: KernelParams, residuals: tuple[jax.Array, jax.Array], cotangents: tuple[jax.Array, ...]) -> tuple:
    """Cosines and sines get no gradient."""
    M, _, H = cotangents[0].shape
    tokens = math.gcd(params.tile.tokens, M)
    d_heads_MAH = pl.pallas_call(
        partial(_join_kernel, params=params, tokens=tokens),
        grid=(M // tokens, params.ends[2]),
        out_shape=jax.ShapeDtypeStruct((M, params.ends[2], H), cotangents[0].dtype),
        compiler_params=plt.CompilerParams(num_warps=params.tile.warps, num_stages=1),
        interpret=params.interpret,
        name="qkv_rope_backward",
    )(*cotangents, *residuals)
    return d_heads_MAH, None, None


_rotated.defvjp(_forward, _backward)


def _join_kernel(
    q_ref: Any, k_ref: Any, v_ref: Any, cos_ref: Any, sin_ref: Any, heads_ref: Any, *, params: KernelParams, tokens: int
) -> None:
    """A rotation is inverted by rotating the other way, which is also its transpose."""
    rows, head = pl.ds(pl.program_id(0) * tokens, tokens), pl.program_id(1)
    for ref, first, end in zip((q_ref, k_ref, v_ref), (0, *params.ends), params.ends, strict=False):

        @pl.when((head >= first) & (head < end))
        def _(ref: Any = ref, first: int = first) -> None:
            half = heads_ref.shape[2] // 2
            a, b = (ref[rows, head - first, pl.ds(start, half)].astype(jnp.float32) for start in (0, half))
            if ref is not v_ref:
                cos, sin = cos_ref[rows], sin_ref[rows]
                a, b = a * cos + b * sin, b * cos - a * sin
            heads_ref[rows, head, pl.ds(0, half)] = a.astype(heads_ref.dtype)
            heads_ref[rows, head, pl.ds(half, half)] = b.astype(heads_ref.dtype)
