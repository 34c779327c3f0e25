"""Storage shared by the quantized weight formats."""

import jax
import jax.numpy as jnp
from flax import nnx


class Quantized(nnx.Variable):
    """An array of a quantized weight: never cast, never trained."""


def pack_nibbles(codes: jax.Array, axis: int) -> jax.Array:
    """Pack 4-bit codes into bytes: two neighbors along an axis per byte, the first in the low half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in (0, 1))
    return (first & 15) | second << 4


def unpack_nibbles(pairs: jax.Array, axis: int) -> jax.Array:
    """The 4-bit codes, 0 to 15, of packed bytes."""
    both = jnp.stack([pairs & 15, pairs >> 4], axis=axis + 1)
    return both.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 1 :])
