"""The chunked gated delta rule (Yang et al., 2024): matmuls within a chunk, a recurrence between chunks.

The value u_i that a token of a chunk writes depends on those written before it, as row i of a triangular system:

    u_i + sum over j < i of  rate_i (k_i . k_j) decay(j, i) u_j  =  rate_i (v_i - decay(start, i) S^T k_i)

The systems of all chunks are inverted at once (the WY form), and only matmuls depend on the state. The difference on
the right is taken before multiplying by the inverse: afterwards, two large results would cancel in float32.

Shapes as in spec.py; C chunks, I and J tokens of a chunk.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.gated_delta.spec import Inputs

# Tokens of a chunk: a larger one has more arithmetic within chunks and fewer sequential steps between them.
CHUNK = 64


class ChunkMatrices(NamedTuple):
    """Matrices that each chunk applies to the state."""

    inverse_CBMGIJ: jax.Array
    value_CBMGJV: jax.Array
    key_CBMGJK: jax.Array
    attention_CBMGIJ: jax.Array
    query_CBMGIK: jax.Array
    last_CBMGJK: jax.Array
    decay_CBMG: jax.Array


Scan = Callable[[jax.Array, ChunkMatrices], tuple[jax.Array, jax.Array]]


def scan(state_BMGKV: jax.Array, matrices: ChunkMatrices) -> tuple[jax.Array, jax.Array]:
    """Return the state after the last chunk, and the outputs of the tokens, [C, B, M, G, I, V]."""

    def chunk(state_BMGKV: jax.Array, matrices: ChunkMatrices) -> tuple[jax.Array, jax.Array]:
        inverse_BMGIJ, v_BMGJV, k_BMGJK, attention_BMGIJ, q_BMGIK, last_BMGJK, decay_BMG = matrices
        update_BMGIV = _matmul(inverse_BMGIJ, v_BMGJV - _matmul(k_BMGJK, state_BMGKV))
        out_BMGIV = _matmul(q_BMGIK, state_BMGKV) + _matmul(attention_BMGIJ, update_BMGIV)
        state_BMGKV = decay_BMG[..., None, None] * state_BMGKV + _matmul(last_BMGJK.swapaxes(-1, -2), update_BMGIV)
        return state_BMGKV, out_BMGIV

    return jax.lax.scan(chunk, state_BMGKV, matrices)


def gated_delta(inputs: Inputs, *, scan: Scan = scan) -> tuple[jax.Array, jax.Array]:
    """Return the outputs [B, T, M, G, V] and the state after the last token."""
    B, T, M = inputs.query_BTMK.shape[:3]
    G = inputs.value_BTMGV.shape[3]
    chunks = -(-T // CHUNK)
    q, k, v, log_decay, rate = (into_chunks(array, chunks) for array in inputs.to_float32()[:5])

    resets_CBI = None if inputs.starts_BT is None else jnp.cumsum(into_chunks(inputs.starts_BT, chunks), axis=-1)
    pairs_CBMGIJ, from_start_CBMGI, to_end_CBMGJ = decays(tokens_last(log_decay), resets_CBI)

    similarity_CBMIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", k, k, precision="highest")
    rate_CBMGI1 = tokens_last(rate)[..., None]
    system_CBMGIJ = jnp.tril(rate_CBMGI1 * similarity_CBMIJ[:, :, :, None] * pairs_CBMGIJ, -1)
    inverse_CBMGIJ = unit_triangular_inverse(system_CBMGIJ)
    attention_CBMGIJ = jnp.einsum("CBIMK,CBJMK->CBMIJ", q, k, precision="highest")[:, :, :, None] * pairs_CBMGIJ
    q_CBMGIK, k_CBMGIK = (jnp.moveaxis(heads, 2, 3)[:, :, :, None] for heads in (q, k))
    from_start = from_start_CBMGI[..., None]
    matrices = ChunkMatrices(
        inverse_CBMGIJ * rate_CBMGI1.swapaxes(-1, -2),
        jnp.moveaxis(v, 2, 4),
        from_start * k_CBMGIK,
        attention_CBMGIJ,
        from_start * q_CBMGIK,
        to_end_CBMGJ[..., None] * k_CBMGIK,
        from_start_CBMGI[..., -1],
    )
    state_BMGKV, out_CBMGIV = scan(inputs.state_BMGKV, matrices)
    out_BTMGV = jnp.moveaxis(out_CBMGIV, (0, 4), (1, 2)).reshape(B, chunks * CHUNK, M, G, -1)
    return out_BTMGV[:, :T], state_BMGKV


@jax.custom_jvp
def unit_triangular_inverse(lower: jax.Array) -> jax.Array:
    """Return the inverse of I + lower, batched, for strictly lower-triangular matrices whose size is a power of two.

    By blocks: the inverse of [[P, 0], [R, Q]] is [[P^-1, 0], [-Q^-1 R P^-1, Q^-1]], from 2 x 2 blocks up, in batched
    matmuls. Entries stay as small as those of the inverse itself, so float32 suffices: the error is up to 4e-6 for
    equal keys, and 1e-6 by a triangular solve. The product of I + (-lower)^(2^n) over n needs as few rounds, but its
    powers overflow for correlated keys (error 1e20). On a CPU, 512 matrices of 64 x 64 take 16 ms and by the solve
    395; on 8 simulated devices the solves also wait for threads of the pool that other devices occupy, without end.
    """
    size = lower.shape[-1]
    if size == 2:
        return jnp.eye(2, dtype=lower.dtype) - lower
    half = size // 2
    first, second = unit_triangular_inverse(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_matmul(second, _matmul(lower[..., half:, :half], first))
    upper = jnp.concatenate([first, jnp.zeros_like(corner)], axis=-1)
    return jnp.concatenate([upper, jnp.concatenate([corner, second], axis=-1)], axis=-2)


@unit_triangular_inverse.defjvp
def _inverse_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    """d(inverse) = -inverse d(lower) inverse: the backward pass needs only the inverse, not its blocks."""
    inverse = unit_triangular_inverse(*primals)
    return inverse, -_matmul(inverse, _matmul(tangents[0], inverse))


def into_chunks(x_BT: jax.Array, chunks: int, size: int = CHUNK) -> jax.Array:
    """[B, T, ...] to [C, B, size, ...]; padding tokens are zeros, which leave the state unchanged."""
    B, T, *rest = x_BT.shape
    padded = jnp.pad(x_BT, [(0, 0), (0, chunks * size - T), *((0, 0) for _ in rest)])
    return padded.reshape(B, chunks, size, *rest).swapaxes(0, 1)


def tokens_last(x_CBIMG: jax.Array) -> jax.Array:
    return jnp.moveaxis(x_CBIMG, 2, 4)


def decays(log_decay_CBMGI: jax.Array, resets_CBI: jax.Array | None) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Decay from each token to each later one, from the start to each token, and from each token to the end.

    Zero across a reset. Every pair has its own sum: a difference of sums over the chunk would lose most digits.
    """
    size = log_decay_CBMGI.shape[-1]
    is_later_IJ = jnp.tril(jnp.ones((size, size), bool), -1)
    pairs = jnp.cumsum(jnp.where(is_later_IJ, log_decay_CBMGI[..., None], 0), axis=-2)
    is_visible, from_start = is_later_IJ | jnp.eye(size, dtype=bool), jnp.cumsum(log_decay_CBMGI, axis=-1)
    if resets_CBI is not None:
        is_same = resets_CBI[..., :, None] == resets_CBI[..., None, :]
        is_visible = is_visible & is_same[:, :, None, None]
        from_start = jnp.where((resets_CBI == 0)[:, :, None, None], from_start, -jnp.inf)
    pairs = jnp.exp(jnp.where(is_visible, pairs, -jnp.inf))
    return pairs, jnp.exp(from_start), pairs[..., -1, :]


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision="highest")
