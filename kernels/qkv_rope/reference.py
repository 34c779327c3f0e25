"""The oracle, which XLA also fuses well: split the projection, then rotate queries and keys."""

import jax
import jax.numpy as jnp


def qkv_rope(
    heads_MAH: jax.Array, cos_MF: jax.Array, sin_MF: jax.Array, *, num_heads: int, num_kv_heads: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q_MNH, k_MKH, v_MKH = jnp.split(heads_MAH, (num_heads, num_heads + num_kv_heads), axis=1)
    return (
        rotate_halves(q_MNH, cos_MF[:, None], sin_MF[:, None]),
        rotate_halves(k_MKH, cos_MF[:, None], sin_MF[:, None]),
        v_MKH,
    )


def rotate_halves(heads: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the pairs formed by the two halves of the last dimension, in float32."""
    a, b = jnp.split(heads.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(heads.dtype)
