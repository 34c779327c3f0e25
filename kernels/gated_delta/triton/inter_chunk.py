"""The recurrence over chunks and its gradient: a program carries some columns of one head's state through all chunks.

Columns of the state are independent of each other.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.triton.common import KernelParams, Systems, Tile, Tokens


class ForwardStates(NamedTuple):
    """Results of the forward recurrence; the last two only if the gradient needs them."""

    out_BTNV: jax.Array
    state_BNKV: jax.Array
    update_BTNV: jax.Array | None
    states_BNCKV: jax.Array | None
    """State before each chunk."""


class BackwardStates(NamedTuple):
    d_state_BNKV: jax.Array
    d_solved_BTNV: jax.Array
    """Gradient of the right-hand sides that the inverses are applied to."""
    d_states_BNCKV: jax.Array
    """Gradient of the state after each chunk."""


def forward(
    params: KernelParams, tokens: Tokens, chunk_systems: Systems, state_BNKV: jax.Array, *, save_residuals: bool
) -> ForwardStates:
    values, states = _shapes(params, tokens)
    out_shape = [
        jax.ShapeDtypeStruct(values.shape, jnp.float32),
        jax.ShapeDtypeStruct(state_BNKV.shape, jnp.float32),
        *((values, states) if save_residuals else ()),
    ]
    results = _call(_forward_kernel, params, params.tiles.forward, tokens, out_shape, name="gated_delta")(
        tokens.query_BTMK, tokens.key_BTMK, tokens.value_BTNV, tokens.rate_BNT, chunk_systems, state_BNKV
    )
    return ForwardStates(*results, *(() if save_residuals else (None, None)))


def backward(
    params: KernelParams, tokens: Tokens, chunk_systems: Systems, d_out_BTNV: jax.Array, d_state_BNKV: jax.Array
) -> BackwardStates:
    values, states = _shapes(params, tokens)
    out_shape = [jax.ShapeDtypeStruct(d_state_BNKV.shape, jnp.float32), values, states]
    results = _call(_backward_kernel, params, params.tiles.backward, tokens, out_shape, name="gated_delta_backward")(
        tokens.query_BTMK, tokens.key_BTMK, tokens.rate_BNT, chunk_systems, d_out_BTNV, d_state_BNKV
    )
    return BackwardStates(*results)


def _shapes(params: KernelParams, tokens: Tokens) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Shapes of the saved per-token values and of the saved states."""
    (B, _, N, V), K = tokens.value_BTNV.shape, tokens.key_BTMK.shape[3]
    states = jax.ShapeDtypeStruct((B, N, tokens.grid[0], K, V), params.dtype)
    return jax.ShapeDtypeStruct(tokens.value_BTNV.shape, params.dtype), states


def _call(kernel: Any, params: KernelParams, tile: Tile, tokens: Tokens, out_shape: list, *, name: str) -> Any:
    B, _, N, V = tokens.value_BTNV.shape
    columns = min(tile.columns, V)
    return pl.pallas_call(
        partial(kernel, params=params, shared=tokens.shared, columns=columns),
        grid=(V // columns, N, B),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=params.interpret,
        name=name,
    )


class _Position(NamedTuple):
    """Position of a program: row, value head, key head and columns of the values."""

    b: Any
    n: Any
    m: Any
    columns: Any

    @classmethod
    def here(cls, shared: int, columns: int) -> "_Position":
        part, n, b = (pl.program_id(axis) for axis in range(3))
        return cls(b, n, jax.lax.div(n, jnp.int32(shared)), pl.ds(part * columns, columns))


def _forward_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    rate_ref: Any,
    chunk_systems: Systems,
    initial_ref: Any,
    out_ref: Any,
    final_ref: Any,
    *saved_refs: Any,
    params: KernelParams,
    shared: int,
    columns: int,
) -> None:
    b, n, m, value_columns = _Position.here(shared, columns)

    def chunk(c: Any, state_KV: jax.Array) -> jax.Array:
        rows, dot = pl.ds(c * CHUNK, CHUNK), params.dot
        q_IK, k_JK = query_ref[b, rows, m, :], key_ref[b, rows, m, :]
        from_start_I1 = chunk_systems.from_start_BNT[b, n, rows][:, None]
        predicted_JV = from_start_I1 * dot(k_JK, state_KV)
        residual_JV = rate_ref[b, n, rows][:, None] * (value_ref[b, rows, n, value_columns] - predicted_JV)
        update_JV = dot(chunk_systems.inverse_BNTJ[b, n, rows, :], residual_JV)
        attended_IV = dot(chunk_systems.attention_BNTJ[b, n, rows, :], update_JV)
        out_ref[b, rows, n, value_columns] = from_start_I1 * dot(q_IK, state_KV) + attended_IV
        if saved_refs:
            update_ref, states_ref = saved_refs
            update_ref[b, rows, n, value_columns] = update_JV.astype(params.dtype)
            states_ref[b, n, c, :, value_columns] = state_KV.astype(params.dtype)
        decay = chunk_systems.from_start_BNT[b, n, c * CHUNK + CHUNK - 1]
        return decay * state_KV + dot(k_JK.T, chunk_systems.to_end_BNT[b, n, rows][:, None] * update_JV)

    final_ref[b, n, :, value_columns] = jax.lax.fori_loop(
        0, rate_ref.shape[2] // CHUNK, chunk, initial_ref[b, n, :, value_columns]
    )


def _backward_kernel(
    query_ref: Any,
    key_ref: Any,
    rate_ref: Any,
    chunk_systems: Systems,
    d_out_ref: Any,
    d_final_ref: Any,
    d_initial_ref: Any,
    d_solved_ref: Any,
    d_states_ref: Any,
    *,
    params: KernelParams,
    shared: int,
    columns: int,
) -> None:
    b, n, m, value_columns = _Position.here(shared, columns)
    chunks = rate_ref.shape[2] // CHUNK

    def chunk(step: Any, d_state_KV: jax.Array) -> jax.Array:
        c, dot = chunks - 1 - step, params.dot
        rows = pl.ds(c * CHUNK, CHUNK)
        q_IK, k_JK, d_out_IV = query_ref[b, rows, m, :], key_ref[b, rows, m, :], d_out_ref[b, rows, n, value_columns]
        from_start_I1 = chunk_systems.from_start_BNT[b, n, rows][:, None]
        d_states_ref[b, n, c, :, value_columns] = d_state_KV.astype(params.dtype)
        d_update_JV = dot(chunk_systems.attention_BNTJ[b, n, rows, :].T, d_out_IV)
        d_update_JV += chunk_systems.to_end_BNT[b, n, rows][:, None] * dot(k_JK, d_state_KV)
        d_solved_JV = dot(chunk_systems.inverse_BNTJ[b, n, rows, :].T, d_update_JV)
        d_solved_ref[b, rows, n, value_columns] = d_solved_JV.astype(params.dtype)
        d_predicted_JV = from_start_I1 * rate_ref[b, n, rows][:, None] * d_solved_JV
        decay = chunk_systems.from_start_BNT[b, n, c * CHUNK + CHUNK - 1]
        return decay * d_state_KV + dot(q_IK.T, from_start_I1 * d_out_IV) - dot(k_JK.T, d_predicted_JV)

    d_initial_ref[b, n, :, value_columns] = jax.lax.fori_loop(0, chunks, chunk, d_final_ref[b, n, :, value_columns])
