"""What a layer keeps of earlier tokens.

A cache is any pytree of arrays. The mixer that needs it makes it (`empty_cache`), finds it in `ctx.cache` and returns
its successor; the decoder only stacks, slices and hands on, so that a latent, recurrent, ring or paged cache is a new
class here and no change there.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Keys and values of every token so far; the token at position p lies in slot p of its row.

    B batch, S slots, K key and value heads, H head size.
    """

    key_BSKH: jax.Array
    value_BSKH: jax.Array
    length_B: jax.Array
    """Slots written in each row."""

    @classmethod
    def empty(cls, batch: int, length: int, *, kv_heads: int, head_dim: int, dtype: np.dtype) -> "DenseCache":
        shape = (batch, length, kv_heads, head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def insert(self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array) -> "DenseCache":
        """Write tokens into the slots of their positions; those with a negative position (padding) are left out.

        Nothing is written beyond the last slot: the caller sizes the cache for the longest sequence.
        """
        slots_BT = jnp.where(positions_BT < 0, self.key_BSKH.shape[1], positions_BT)
        return DenseCache(
            key_BSKH=_write(self.key_BSKH, slots_BT, key_BTKH),
            value_BSKH=_write(self.value_BSKH, slots_BT, value_BTKH),
            length_B=jnp.maximum(self.length_B, jnp.max(positions_BT, axis=1) + 1),
        )

    @property
    def positions_BS(self) -> jax.Array:
        """Position of the token in each slot; -1 where none has been written."""
        slots_1S = jnp.arange(self.key_BSKH.shape[1], dtype=jnp.int32)[None]
        return jnp.where(slots_1S < self.length_B[:, None], slots_1S, -1)


@jax.vmap
def _write(buffer_SKH: jax.Array, slots_T: jax.Array, new_TKH: jax.Array) -> jax.Array:
    return buffer_SKH.at[slots_T].set(new_TKH, mode="drop")
