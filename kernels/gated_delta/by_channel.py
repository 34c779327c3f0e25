"""The delta rule with a decay per channel of the key (Kimi Linear, 2025), by chunks in XLA.

As chunked.py, except that the decay between two tokens is a vector: the similarity of a query or key i with a key j is
the sum over channels of x_i k_j exp(G_i - G_j), G the sums of the log decays. Differences of sums are at most zero, so
that no exponential overflows. Chunks are smaller, because a pair of tokens has a decay per channel.

Shapes: B batch, T tokens, N heads, K key size, V value size; I and J tokens of a chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.chunked import into_chunks, unit_triangular_inverse
from maxhydra.kernels.gated_delta.spec import segment_starts

CHUNK = 32


class Tokens(NamedTuple):
    """Inputs of the rule in float32."""

    query_BTNK: jax.Array
    key_BTNK: jax.Array
    value_BTNV: jax.Array
    log_decay_BTNK: jax.Array
    rate_BTN: jax.Array


def gated_delta_by_channel(
    tokens: Tokens, *, state_BNKV: jax.Array | None, segments_BT: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, N, V] and the state [B, N, K, V] after the last token, both in float32.

    Segment 0 is padding; every other segment starts from a zero state, except the first of a row, which continues from
    the given state.
    """
    B, T, N, K = tokens.key_BTNK.shape
    first_BNKV = jnp.zeros((B, N, K, tokens.value_BTNV.shape[-1])) if state_BNKV is None else state_BNKV
    starts_BT = jnp.zeros((B, T), bool)
    if segments_BT is not None:
        is_token_BT1, starts_BT = (segments_BT != 0)[..., None], segment_starts(segments_BT)
        log_decay_BTNK = jnp.where(is_token_BT1[..., None], tokens.log_decay_BTNK, 0)
        tokens = tokens._replace(log_decay_BTNK=log_decay_BTNK, rate_BTN=jnp.where(is_token_BT1, tokens.rate_BTN, 0))
    if T == 1:
        return _one_token(tokens, first_BNKV)
    chunks = -(-T // CHUNK)
    in_chunks = [into_chunks(x, chunks, CHUNK) for x in (*tokens, starts_BT)]
    last_BNKV, out_CBINV = jax.lax.scan(jax.checkpoint(_chunk), first_BNKV, tuple(in_chunks))
    return out_CBINV.swapaxes(0, 1).reshape(B, chunks * CHUNK, N, -1)[:, :T], last_BNKV


def _one_token(tokens: Tokens, state_BNKV: jax.Array) -> tuple[jax.Array, jax.Array]:
    q_BNK, k_BNK, v_BNV, log_decay_BNK, rate_BN = (x[:, 0] for x in tokens)
    state_BNKV = jnp.exp(log_decay_BNK)[..., None] * state_BNKV
    change_BNV = rate_BN[..., None] * (v_BNV - _einsum("BNK,BNKV->BNV", k_BNK, state_BNKV))
    state_BNKV = state_BNKV + k_BNK[..., None] * change_BNV[:, :, None]
    return _einsum("BNK,BNKV->BNV", q_BNK, state_BNKV)[:, None], state_BNKV


def _chunk(state_BNKV: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the state after the chunk, and the outputs [B, I, N, V] of its tokens."""
    q_BINK, k_BINK, v_BINV, log_decay_BINK, rate_BIN, starts_BI = inputs
    resets_BI, total_BINK = jnp.cumsum(starts_BI, axis=1), jnp.cumsum(log_decay_BINK, axis=1)
    is_visible_BIJ = jnp.tril(resets_BI[:, :, None] == resets_BI[:, None, :])
    differences_BIJNK = total_BINK[:, :, None] - total_BINK[:, None]
    decay_BIJNK = jnp.exp(jnp.where(is_visible_BIJ[..., None, None], differences_BIJNK, -jnp.inf))
    from_start_BINK = jnp.exp(jnp.where((resets_BI == 0)[..., None, None], total_BINK, -jnp.inf))
    similarity_BNIJ = _einsum("BINK,BIJNK->BNIJ", k_BINK, decay_BIJNK * k_BINK[:, None])
    attention_BNIJ = _einsum("BINK,BIJNK->BNIJ", q_BINK, decay_BIJNK * k_BINK[:, None])
    rate_BNI1 = rate_BIN.swapaxes(1, 2)[..., None]
    inverse_BNIJ = unit_triangular_inverse(jnp.tril(rate_BNI1 * similarity_BNIJ, -1))
    known_BINV = _einsum("BINK,BNKV->BINV", from_start_BINK * k_BINK, state_BNKV)
    update_BNJV = _einsum("BNIJ,BNJV->BNIV", inverse_BNIJ, rate_BNI1 * (v_BINV - known_BINV).swapaxes(1, 2))
    out_BINV = _einsum("BINK,BNKV->BINV", from_start_BINK * q_BINK, state_BNKV)
    out_BINV = out_BINV + _einsum("BNIJ,BNJV->BINV", attention_BNIJ, update_BNJV)
    change_BNKV = _einsum("BJNK,BNJV->BNKV", decay_BIJNK[:, -1] * k_BINK, update_BNJV)
    return from_start_BINK[:, -1, ..., None] * state_BNKV + change_BNKV, out_BINV


def _einsum(expression: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(expression, *arrays, precision="highest")
