"""Inputs of the gated delta rule, the handling of padding and segments, and the oracle.

The oracle computes the rule as defined in the paper (Yang et al., 2024), token by token, which is optimal for a single
token:

    S <- exp(log_decay) S
    S <- S + rate * k (v - S^T k)^T
    out = S^T q

Shapes: B batch, T tokens, M key heads, G value heads per key head, K key size, V value size.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Inputs(NamedTuple):
    """Arguments of the gated delta rule. Decays, rates and the state are float32; heads have their own dtypes."""

    query_BTMK: jax.Array
    """Already scaled."""
    key_BTMK: jax.Array
    """Of unit length, or near it: a longer key would overshoot instead of overwriting the old value."""
    value_BTMGV: jax.Array
    log_decay_BTMG: jax.Array
    """At most 0: a token multiplies the state by its exponential."""
    rate_BTMG: jax.Array
    """From 0 to 1: the fraction of the value stored under the key that is replaced."""
    state_BMGKV: jax.Array
    """State before the first token."""
    starts_BT: jax.Array | None
    """Tokens at which the state is reset to zero; None: no resets."""

    def to_float32(self) -> "Inputs":
        """With heads cast to float32 too."""
        query, key, value = (heads.astype(jnp.float32) for heads in self[:3])
        return self._replace(query_BTMK=query, key_BTMK=key, value_BTMGV=value)


def masked(inputs: Inputs, segments_BT: jax.Array | None) -> Inputs:
    """Make padding (segment 0) leave the state unchanged, and reset the state at every change of segment.

    The first segment of a row continues from the given state.
    """
    if segments_BT is None:
        return inputs
    is_token_BT11 = (segments_BT != 0)[:, :, None, None]
    return inputs._replace(
        log_decay_BTMG=jnp.where(is_token_BT11, inputs.log_decay_BTMG, 0),
        rate_BTMG=jnp.where(is_token_BT11, inputs.rate_BTMG, 0),
        starts_BT=segment_starts(segments_BT),
    )


def segment_starts(segments_BT: jax.Array) -> jax.Array:
    """[B, T] tokens whose segment differs from that of the last token before them, padding (segment 0) ignored."""
    # The segment of the last token before each one; 0 if there is none. No gather: XLA's partitioner fails on it on a
    # mesh with stages and tensor parallelism.
    last_BT = jax.lax.associative_scan(lambda a, b: jnp.where(b == 0, a, b), segments_BT, axis=1)
    earlier_BT = jnp.pad(last_BT, ((0, 0), (1, 0)))[:, :-1]
    return (segments_BT != 0) & (earlier_BT != 0) & (earlier_BT != segments_BT)


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
