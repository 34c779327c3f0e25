"""An even load on experts: what it is, a loss that asks for it, and a bias that brings it about without one.

B batch, T tokens, K experts of a token, E experts.
"""

import jax
import jax.numpy as jnp


def load(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """How many tokens were given to each expert, float32 [E]; padding does not count."""
    is_given_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2)
    if is_real_BT is not None:
        is_given_BTE = is_given_BTE & is_real_BT[..., None]
    return jnp.sum(is_given_BTE, axis=(0, 1), dtype=jnp.float32)


def balance_loss(load_E: jax.Array, shares_BTE: jax.Array, is_real_BT: jax.Array | None) -> jax.Array:
    """E * sum_e f_e p_e, f the share of the load and p the mean share of the scores (Fedus et al., 2022; equation 4).

    1 where both are even. The gradient goes through p: a load is a count, and has none.
    """
    real_BT1 = jnp.ones(shares_BTE.shape[:2]) if is_real_BT is None else is_real_BT
    real_BT1 = real_BT1.astype(jnp.float32)[..., None]
    mean_E = jnp.sum(shares_BTE * real_BT1, axis=(0, 1)) / jnp.maximum(jnp.sum(real_BT1), 1)
    return load_E.size * jnp.sum(load_E / jnp.maximum(jnp.sum(load_E), 1) * mean_E)


def corrected(bias: jax.Array, load: jax.Array, *, rate: float) -> jax.Array:
    """The bias [..., E] of the choice after a step with this load: b + rate * sign(mean - load) (Wang et al., 2024)."""
    move = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return bias + move.astype(bias.dtype)
