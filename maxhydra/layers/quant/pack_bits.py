"""What weights that are kept in fewer bits than they are used in have in common."""

import jax
import jax.numpy as jnp
from flax import nnx


class Quantized(nnx.Variable):
    """An array that is used as it is kept: never cast, never trained."""


def paired(codes: jax.Array, axis: int) -> jax.Array:
    """Codes of four bits as bytes: two neighbours along an axis in each, the first in the lower half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in (0, 1))
    return (first & 15) | second << 4


def parted(pairs: jax.Array, axis: int) -> jax.Array:
    """The codes of such bytes, 0 to 15."""
    both = jnp.stack([pairs & 15, pairs >> 4], axis=axis + 1)
    return both.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 1 :])
