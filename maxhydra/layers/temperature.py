"""Queries that grow with their position, so that attention stays sharp over long contexts (Nakanishi, 2025)."""

import jax
import jax.numpy as jnp


def scale_queries(q_BTNH: jax.Array, positions_BT: jax.Array, floor: int, scale: float) -> jax.Array:
    """q * (1 + scale * ln(1 + floor((position + 1) / floor)))."""
    steps_BT = jnp.floor((positions_BT.astype(jnp.float32) + 1) / floor)
    factor_BT = 1 + scale * jnp.log1p(steps_BT)
    return (q_BTNH.astype(jnp.float32) * factor_BT[:, :, None, None]).astype(q_BTNH.dtype)
