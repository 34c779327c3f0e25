"""The oracle: the gated delta rule as defined in the paper (Yang et al., 2024), token by token.

    S <- exp(log_decay) S
    S <- S + rate * k (v - S^T k)^T
    out = S^T q

This is optimal for a single token.
"""

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.spec import Inputs


def gated_delta(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, M, G, V] and the state after the last token."""

    def step(state_BMGKV: jax.Array, token: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        q_BMK, k_BMK, v_BMGV, log_decay_BMG, rate_BMG, is_start_B = token
        state_BMGKV = jnp.where(is_start_B[:, None, None, None, None], 0, state_BMGKV)
        state_BMGKV = jnp.exp(log_decay_BMG)[..., None, None] * state_BMGKV
        predicted_BMGV = jnp.einsum("BMGKV,BMK->BMGV", state_BMGKV, k_BMK, precision="highest")
        change_BMGV = rate_BMG[..., None] * (v_BMGV - predicted_BMGV)
        state_BMGKV = state_BMGKV + k_BMK[:, :, None, :, None] * change_BMGV[:, :, :, None, :]
        return state_BMGKV, jnp.einsum("BMGKV,BMK->BMGV", state_BMGKV, q_BMK, precision="highest")

    inputs = inputs.to_float32()
    starts_BT = inputs.starts_BT
    if starts_BT is None:
        starts_BT = jnp.zeros(inputs.query_BTMK.shape[:2], bool)
    tokens = (*inputs[:5], starts_BT)
    state_BMGKV, out_TBMGV = jax.lax.scan(step, inputs.state_BMGKV, tuple(array.swapaxes(0, 1) for array in tokens))
    return out_TBMGV.swapaxes(0, 1), state_BMGKV
