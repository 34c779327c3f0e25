"""The gated delta rule chunk by chunk (Yang et al., 2024): within a chunk matrix products, between chunks the state.

What the tokens of a chunk write depends on what those before them wrote. Row i of a triangular system says so:

    u_i + sum over j < i of  rate_i (k_i . k_j) decay(j, i) u_j  =  rate_i (v_i - decay(start, i) S^T k_i)

Its right side is linear in the state S at the chunk's start, so that all chunks are solved at once, for the values and
for the keys (the WY form), and only three products a chunk wait for the state.

Shapes as in request.py; C chunks, I and J tokens of a chunk.
"""

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.request import Inputs

# Tokens of a chunk: the arithmetic within chunks grows with it, the number of steps between them falls.
CHUNK = 64


def gated_delta(inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """What every token reads, [B, T, M, G, V], and the state after the last."""
    B, T, M = inputs.query_BTMK.shape[:3]
    G = inputs.value_BTMGV.shape[3]
    chunks = -(-T // CHUNK)
    q, k, v, log_decay, rate = (_chunked(array, chunks) for array in inputs[:5])

    decay_CBMGI = jnp.cumsum(_tokens_last(log_decay), axis=-1)
    resets_CBI = None if inputs.starts_BT is None else jnp.cumsum(_chunked(inputs.starts_BT, chunks), axis=-1)
    pairs_CBMGIJ, from_start_CBMGI, to_end_CBMGJ = _decays(decay_CBMGI, resets_CBI)

    rate_CBMGI = _tokens_last(rate)
    alike_CBMIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", k, k, precision="highest")
    system_CBMGIJ = jnp.tril(rate_CBMGI[..., None] * alike_CBMIJ[:, :, :, None] * pairs_CBMGIJ, -1)
    v_CBMGIV, k_CBMGIK = jnp.moveaxis(v, 2, 4), jnp.moveaxis(k, 2, 3)[:, :, :, None]
    rights = jnp.concatenate([v_CBMGIV, from_start_CBMGI[..., None] * k_CBMGIK], axis=-1)
    solved = jax.scipy.linalg.solve_triangular(
        system_CBMGIJ, rate_CBMGI[..., None] * rights, lower=True, unit_diagonal=True
    )
    own_CBMGIV, reading_CBMGIK = jnp.split(solved, [v.shape[-1]], axis=-1)
    seen_CBMGIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", q, k, precision="highest")[:, :, :, None] * pairs_CBMGIJ
    q_CBMGIK = from_start_CBMGI[..., None] * jnp.moveaxis(q, 2, 3)[:, :, :, None]
    k_CBMGJK = to_end_CBMGJ[..., None] * k_CBMGIK

    def chunk(state_BMGKV: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        own_BMGIV, reading_BMGIK, seen_BMGIJ, q_BMGIK, k_BMGJK, kept_BMG = parts
        written_BMGIV = own_BMGIV - _product(reading_BMGIK, state_BMGKV)
        out_BMGIV = _product(q_BMGIK, state_BMGKV) + _product(seen_BMGIJ, written_BMGIV)
        state_BMGKV = kept_BMG[..., None, None] * state_BMGKV + _product(k_BMGJK.swapaxes(-1, -2), written_BMGIV)
        return state_BMGKV, out_BMGIV

    parts = (own_CBMGIV, reading_CBMGIK, seen_CBMGIJ, q_CBMGIK, k_CBMGJK, from_start_CBMGI[..., -1])
    state_BMGKV, out_CBMGIV = jax.lax.scan(chunk, inputs.state_BMGKV, parts)
    out_BTMGV = jnp.moveaxis(out_CBMGIV, (0, 4), (1, 2)).reshape(B, chunks * CHUNK, M, G, -1)
    return out_BTMGV[:, :T], state_BMGKV


def _chunked(x_BT: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] to [C, B, CHUNK, ...]; tokens that are added are zeros, which leave the state alone."""
    B, T, *rest = x_BT.shape
    padded = jnp.pad(x_BT, [(0, 0), (0, chunks * CHUNK - T), *((0, 0) for _ in rest)])
    return padded.reshape(B, chunks, CHUNK, *rest).swapaxes(0, 1)


def _tokens_last(x_CBIMG: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_CBIMG, 2, 4)


def _decays(decay_CBMGI: jax.Array, resets_CBI: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left of a token at a later one, of the state at each, and of each at the end; nothing across a start."""
    size = decay_CBMGI.shape[-1]
    is_seen_IJ = jnp.tril(jnp.ones((size, size), bool))
    pairs = decay_CBMGI[..., :, None] - decay_CBMGI[..., None, :]
    to_end = decay_CBMGI[..., -1:] - decay_CBMGI
    if resets_CBI is None:
        return jnp.exp(jnp.where(is_seen_IJ, pairs, -jnp.inf)), jnp.exp(decay_CBMGI), jnp.exp(to_end)
    is_same = (resets_CBI[..., :, None] == resets_CBI[..., None, :]) & is_seen_IJ
    is_first, is_last = resets_CBI == 0, resets_CBI == resets_CBI[..., -1:]
    return (
        jnp.exp(jnp.where(is_same[:, :, None, None], pairs, -jnp.inf)),
        jnp.exp(jnp.where(is_first[:, :, None, None], decay_CBMGI, -jnp.inf)),
        jnp.exp(jnp.where(is_last[:, :, None, None], to_end, -jnp.inf)),
    )


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
