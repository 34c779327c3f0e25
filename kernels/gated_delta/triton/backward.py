"""Gradients of the tokens of a chunk, from the states before and after it and their gradients.

With S before and S' after the chunk, W the written values, and Y the gradient of the right-hand side that the inverse
is applied to, which is R (v - from_start (k S)):

    d v = R Y
    d rate = Y . (v - from_start (k S) - (k k^T pairs) W)
    d q = from_start (d_out S^T) + E k                                       E = (d_out W^T) pairs
    d k = to_end (W d_S'^T) - from_start R (Y S^T) + E^T q + (D + D^T) k     D = -R (Y W^T) pairs, below the diagonal
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.triton.common import KernelParams, Systems, Tokens, decays, square_indices
from maxhydra.kernels.gated_delta.triton.inter_chunk import BackwardStates, ForwardStates


class Refs(NamedTuple):
    """Inputs of the kernel."""

    tokens: Tokens
    attention_BNTJ: Any
    d_out_BTNV: Any
    update_BTNV: Any
    states_BNCKV: Any
    d_solved_BTNV: Any
    d_states_BNCKV: Any


def gradients(
    params: KernelParams,
    tokens: Tokens,
    chunk_systems: Systems,
    d_out_BTNV: jax.Array,
    forward_states: ForwardStates,
    backward_states: BackwardStates,
) -> Tokens:
    """Gradients of queries, keys and decays are float32; those of value heads that share a key head are summed."""
    (B, T, M, K), (*_, N, V) = tokens.key_BTMK.shape, tokens.value_BTNV.shape
    tile, per_head = params.tiles.gradients, jax.ShapeDtypeStruct((B, T, N, K), jnp.float32)
    vector = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    d_query, d_key, d_log_decay_BNT, d_rate_BNT = pl.pallas_call(
        partial(_kernel, params=params, columns=min(tile.columns, V)),
        grid=tokens.grid,
        out_shape=(per_head, per_head, vector, vector),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=params.interpret,
        name="gated_delta_gradients",
    )(
        Refs(
            tokens,
            chunk_systems.attention_BNTJ,
            d_out_BTNV,
            forward_states.update_BTNV,
            forward_states.states_BNCKV,
            *backward_states[1:],
        )
    )
    d_query_BTMK, d_key_BTMK = (jnp.sum(x.reshape(B, T, M, -1, K), axis=3) for x in (d_query, d_key))
    d_value_BTNV = tokens.rate_BNT.swapaxes(1, 2)[..., None] * backward_states.d_solved_BTNV
    return Tokens(d_query_BTMK, d_key_BTMK, d_value_BTNV, d_log_decay_BNT, d_rate_BNT, tokens.resets_BT)


class _Sums(NamedTuple):
    """Sums over all columns of the values, accumulated a few columns at a time."""

    out_by_update_IJ: Any
    solved_by_update_IJ: Any
    out_by_state_IK: Any
    solved_by_state_JK: Any
    update_by_d_state_JK: Any
    solved_by_value_J: Any
    state_by_d_state_V: Any


def _kernel(
    refs: Refs,
    d_query_ref: Any,
    d_key_ref: Any,
    d_log_decay_ref: Any,
    d_rate_ref: Any,
    *,
    params: KernelParams,
    columns: int,
) -> None:
    tokens, dot = refs.tokens, params.dot
    c, n, b = (pl.program_id(axis) for axis in range(3))
    rows, m = pl.ds(c * CHUNK, CHUNK), jax.lax.div(n, jnp.int32(tokens.shared))
    sums = _column_sums(params, refs, (b, c, n, rows), columns)
    q_IK, k_JK = tokens.query_BTMK[b, rows, m, :], tokens.key_BTMK[b, rows, m, :]
    rate_I = tokens.rate_BNT[b, n, rows]
    pairs_IJ, from_start_I, to_end_J = decays(tokens.log_decay_BNT[b, n, rows], tokens.resets_BT[b, rows])
    i, j = square_indices()
    pairs_below_IJ = jnp.where(i > j, pairs_IJ, 0.0)
    similarity_IJ = pairs_below_IJ * dot(k_JK, k_JK.T)
    d_similarity_IJ = -rate_I[:, None] * sums.solved_by_update_IJ
    d_attention_IJ = pairs_IJ * sums.out_by_update_IJ
    of_key_I = jnp.sum(k_JK * sums.solved_by_state_JK, axis=1)
    d_rate_ref[b, n, rows] = (
        sums.solved_by_value_J - from_start_I * of_key_I - jnp.sum(similarity_IJ * sums.solved_by_update_IJ, axis=1)
    )
    d_query_ref[b, rows, n, :] = from_start_I[:, None] * sums.out_by_state_IK + dot(d_attention_IJ, k_JK)
    d_keys_IJ = pairs_below_IJ * d_similarity_IJ
    d_key_JK = to_end_J[:, None] * sums.update_by_d_state_JK
    d_key_JK -= (from_start_I * rate_I)[:, None] * sums.solved_by_state_JK
    d_key_JK += dot(d_attention_IJ.T, q_IK) + dot(d_keys_IJ, k_JK) + dot(d_keys_IJ.T, k_JK)
    d_key_ref[b, rows, n, :] = d_key_JK

    # Gradients of the log decays: of each pair, from the start to each token, and from each token to the end.
    d_pair_IJ = (
        jnp.where(i > j, refs.attention_BNTJ[b, n, rows, :] * sums.out_by_update_IJ, 0.0)
        + similarity_IJ * d_similarity_IJ
    )
    at_end_J = to_end_J * jnp.sum(k_JK * sums.update_by_d_state_JK, axis=1)
    d_start_I = from_start_I * (jnp.sum(q_IK * sums.out_by_state_IK, axis=1) - rate_I * of_key_I)
    is_last = jax.lax.iota(jnp.int32, CHUNK) == CHUNK - 1
    d_end = jnp.sum(at_end_J) + jnp.sum(jnp.where(is_last, from_start_I, 0.0)) * jnp.sum(sums.state_by_d_state_V)
    own_I = jnp.sum(d_pair_IJ, axis=1) - jnp.sum(d_pair_IJ, axis=0) + d_start_I - at_end_J
    own_I += jnp.where(is_last, d_end, 0.0)
    # A token's decay is a factor of every pair that it is between.
    d_log_decay_ref[b, n, rows] = jnp.sum(jnp.where(i >= j, own_I[:, None], 0.0), axis=0)


def _column_sums(params: KernelParams, refs: Refs, position: tuple[Any, Any, Any, Any], columns: int) -> _Sums:
    (b, c, n, rows), dot = position, params.dot
    K, V = refs.states_BNCKV.shape[3:]

    def add(step: Any, sums: _Sums) -> _Sums:
        value_columns = pl.ds(step * columns, columns)
        d_out_IV, update_JV = refs.d_out_BTNV[b, rows, n, value_columns], refs.update_BTNV[b, rows, n, value_columns]
        solved_JV, value_JV = (
            refs.d_solved_BTNV[b, rows, n, value_columns],
            refs.tokens.value_BTNV[b, rows, n, value_columns],
        )
        state_KV, d_state_KV = (
            refs.states_BNCKV[b, n, c, :, value_columns],
            refs.d_states_BNCKV[b, n, c, :, value_columns],
        )
        terms = _Sums(
            dot(d_out_IV, update_JV.T),
            dot(solved_JV, update_JV.T),
            dot(d_out_IV, state_KV.T),
            dot(solved_JV, state_KV.T),
            dot(update_JV, d_state_KV.T),
            jnp.sum(_wide(solved_JV) * _wide(value_JV), axis=1),
            jnp.sum(_wide(state_KV) * _wide(d_state_KV), axis=0),
        )
        return jax.tree.map(jnp.add, sums, terms)

    shapes = [(CHUNK, CHUNK)] * 2 + [(CHUNK, K)] * 3 + [(CHUNK,), (columns,)]
    return jax.lax.fori_loop(0, V // columns, add, _Sums(*(jnp.zeros(shape, jnp.float32) for shape in shapes)))


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32)
