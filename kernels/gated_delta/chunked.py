"""The gated delta rule chunk by chunk (Yang et al., 2024): within a chunk matrix products, between chunks the state.

What the tokens of a chunk write depends on what those before them wrote. Row i of a triangular system says so:

    u_i + sum over j < i of  rate_i (k_i . k_j) decay(j, i) u_j  =  rate_i (v_i - decay(start, i) S^T k_i)

The systems of all chunks are inverted at once (the WY form), and only products wait for the state. The difference on
the right comes before the product with the inverse: of two large results it would leave little in float32.

Shapes as in request.py; C chunks, I and J tokens of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.spec import Inputs

# Tokens of a chunk: the arithmetic within chunks grows with it, the number of steps between them falls.
CHUNK = 64


class Parts(NamedTuple):
    """What each chunk does with the state, as products."""

    inverse_CBMGIJ: jax.Array
    value_CBMGJV: jax.Array
    key_CBMGJK: jax.Array
    seen_CBMGIJ: jax.Array
    query_CBMGIK: jax.Array
    last_CBMGJK: jax.Array
    kept_CBMG: jax.Array


Scan = Callable[[jax.Array, Parts], tuple[jax.Array, jax.Array]]


def scan(state_BMGKV: jax.Array, parts: Parts) -> tuple[jax.Array, jax.Array]:
    """The state after the last chunk, and what the tokens of each read, [C, B, M, G, I, V]."""

    def chunk(state_BMGKV: jax.Array, parts: Parts) -> tuple[jax.Array, jax.Array]:
        inverse_BMGIJ, v_BMGJV, k_BMGJK, seen_BMGIJ, q_BMGIK, last_BMGJK, kept_BMG = parts
        written_BMGIV = _product(inverse_BMGIJ, v_BMGJV - _product(k_BMGJK, state_BMGKV))
        out_BMGIV = _product(q_BMGIK, state_BMGKV) + _product(seen_BMGIJ, written_BMGIV)
        state_BMGKV = kept_BMG[..., None, None] * state_BMGKV + _product(last_BMGJK.swapaxes(-1, -2), written_BMGIV)
        return state_BMGKV, out_BMGIV

    return jax.lax.scan(chunk, state_BMGKV, parts)


def gated_delta(inputs: Inputs, *, scan: Scan = scan) -> tuple[jax.Array, jax.Array]:
    """What every token reads, [B, T, M, G, V], and the state after the last."""
    B, T, M = inputs.query_BTMK.shape[:3]
    G = inputs.value_BTMGV.shape[3]
    chunks = -(-T // CHUNK)
    q, k, v, log_decay, rate = (_chunked(array, chunks) for array in inputs.wide()[:5])

    resets_CBI = None if inputs.starts_BT is None else jnp.cumsum(_chunked(inputs.starts_BT, chunks), axis=-1)
    pairs_CBMGIJ, from_start_CBMGI, to_end_CBMGJ = _decays(_tokens_last(log_decay), resets_CBI)

    alike_CBMIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", k, k, precision="highest")
    rate_CBMGI1 = _tokens_last(rate)[..., None]
    system_CBMGIJ = jnp.tril(rate_CBMGI1 * alike_CBMIJ[:, :, :, None] * pairs_CBMGIJ, -1)
    ones = jnp.broadcast_to(jnp.eye(CHUNK, dtype=system_CBMGIJ.dtype), system_CBMGIJ.shape)
    inverse_CBMGIJ = jax.scipy.linalg.solve_triangular(system_CBMGIJ, ones, lower=True, unit_diagonal=True)
    seen_CBMGIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", q, k, precision="highest")[:, :, :, None] * pairs_CBMGIJ
    q_CBMGIK, k_CBMGIK = (jnp.moveaxis(heads, 2, 3)[:, :, :, None] for heads in (q, k))
    from_start = from_start_CBMGI[..., None]
    parts = Parts(
        inverse_CBMGIJ * rate_CBMGI1.swapaxes(-1, -2),
        jnp.moveaxis(v, 2, 4),
        from_start * k_CBMGIK,
        seen_CBMGIJ,
        from_start * q_CBMGIK,
        to_end_CBMGJ[..., None] * k_CBMGIK,
        from_start_CBMGI[..., -1],
    )
    state_BMGKV, out_CBMGIV = scan(inputs.state_BMGKV, parts)
    out_BTMGV = jnp.moveaxis(out_CBMGIV, (0, 4), (1, 2)).reshape(B, chunks * CHUNK, M, G, -1)
    return out_BTMGV[:, :T], state_BMGKV


def _chunked(x_BT: jax.Array, chunks: int) -> jax.Array:
    """[B, T, ...] to [C, B, CHUNK, ...]; tokens that are added are zeros, which leave the state alone."""
    B, T, *rest = x_BT.shape
    padded = jnp.pad(x_BT, [(0, 0), (0, chunks * CHUNK - T), *((0, 0) for _ in rest)])
    return padded.reshape(B, chunks, CHUNK, *rest).swapaxes(0, 1)


def _tokens_last(x_CBIMG: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_CBIMG, 2, 4)


def _decays(log_decay_CBMGI: jax.Array, resets_CBI: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What is left of a token at a later one, of the state at each, and of each at the end; nothing across a start.

    Every pair has a sum of its own: a difference of sums over the chunk would leave few of its digits.
    """
    size = log_decay_CBMGI.shape[-1]
    is_later_IJ = jnp.tril(jnp.ones((size, size), bool), -1)
    pairs = jnp.cumsum(jnp.where(is_later_IJ, log_decay_CBMGI[..., None], 0), axis=-2)
    is_seen, from_start = is_later_IJ | jnp.eye(size, dtype=bool), jnp.cumsum(log_decay_CBMGI, axis=-1)
    if resets_CBI is not None:
        is_same = resets_CBI[..., :, None] == resets_CBI[..., None, :]
        is_seen = is_seen & is_same[:, :, None, None]
        from_start = jnp.where((resets_CBI == 0)[:, :, None, None], from_start, -jnp.inf)
    pairs = jnp.exp(jnp.where(is_seen, pairs, -jnp.inf))
    return pairs, jnp.exp(from_start), pairs[..., -1, :]


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
