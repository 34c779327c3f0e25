"""Dropout (Srivastava et al., 2014)."""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, key: jax.Array | None, *, rate: float) -> jax.Array:
    """x with a share `rate` of its entries zeroed and the rest scaled up to the same mean; without a key, x itself."""
    if key is None or rate == 0:
        return x
    kept = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)
