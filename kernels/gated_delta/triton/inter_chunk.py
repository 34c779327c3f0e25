"""The state from chunk to chunk, and its gradient back: a program has some columns of the state of one head, which
nobody else needs, and goes through all chunks with them."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.triton.common import How, Tile
from maxhydra.kernels.gated_delta.triton.intra_chunk import Systems, Tokens


class Passed(NamedTuple):
    """What a pass over the chunks leaves; the last two only where the gradient is wanted."""

    out_BTNV: jax.Array
    state_BNKV: jax.Array
    written_BTNV: jax.Array | None
    states_BNCKV: jax.Array | None
    """Before each chunk."""


class PassedBack(NamedTuple):
    d_state_BNKV: jax.Array
    d_solved_BTNV: jax.Array
    """Of what the inverses are applied to."""
    d_states_BNCKV: jax.Array
    """Of the state after each chunk."""


def forward(how: How, tokens: Tokens, made: Systems, state_BNKV: jax.Array, *, is_kept: bool) -> Passed:
    values, states = _shapes(how, tokens)
    out_shape = [
        jax.ShapeDtypeStruct(values.shape, jnp.float32),
        jax.ShapeDtypeStruct(state_BNKV.shape, jnp.float32),
        *((values, states) if is_kept else ()),
    ]
    found = _call(_forward_kernel, how, how.tiles.forward, tokens, out_shape, name="gated_delta")(
        tokens.query_BTMK, tokens.key_BTMK, tokens.value_BTNV, tokens.rate_BNT, made, state_BNKV
    )
    return Passed(*found, *(() if is_kept else (None, None)))


def backward(how: How, tokens: Tokens, made: Systems, d_out_BTNV: jax.Array, d_state_BNKV: jax.Array) -> PassedBack:
    values, states = _shapes(how, tokens)
    out_shape = [jax.ShapeDtypeStruct(d_state_BNKV.shape, jnp.float32), values, states]
    found = _call(_backward_kernel, how, how.tiles.backward, tokens, out_shape, name="gated_delta_backward")(
        tokens.query_BTMK, tokens.key_BTMK, tokens.rate_BNT, made, d_out_BTNV, d_state_BNKV
    )
    return PassedBack(*found)


def _shapes(how: How, tokens: Tokens) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Of what is kept of every token, and of every state."""
    (B, _, N, V), K = tokens.value_BTNV.shape, tokens.key_BTMK.shape[3]
    states = jax.ShapeDtypeStruct((B, N, tokens.grid[0], K, V), how.dtype)
    return jax.ShapeDtypeStruct(tokens.value_BTNV.shape, how.dtype), states


def _call(kernel: Any, how: How, tile: Tile, tokens: Tokens, out_shape: list, *, name: str) -> Any:
    B, _, N, V = tokens.value_BTNV.shape
    columns = min(tile.columns, V)
    return pl.pallas_call(
        partial(kernel, how=how, shared=tokens.shared, columns=columns),
        grid=(V // columns, N, B),
        out_shape=out_shape,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=how.interpret,
        name=name,
    )


class _Place(NamedTuple):
    """Of a program: row, value head, key head and columns of the values."""

    b: Any
    n: Any
    m: Any
    columns: Any

    @classmethod
    def here(cls, shared: int, columns: int) -> "_Place":
        part, n, b = (pl.program_id(axis) for axis in range(3))
        return cls(b, n, jax.lax.div(n, jnp.int32(shared)), pl.ds(part * columns, columns))


def _forward_kernel(
    query_ref: Any,
    key_ref: Any,
    value_ref: Any,
    rate_ref: Any,
    made: Systems,
    given_ref: Any,
    out_ref: Any,
    left_ref: Any,
    *kept_refs: Any,
    how: How,
    shared: int,
    columns: int,
) -> None:
    b, n, m, own = _Place.here(shared, columns)

    def chunk(c: Any, state_KV: jax.Array) -> jax.Array:
        rows, dot = pl.ds(c * CHUNK, CHUNK), how.dot
        q_IK, k_JK = query_ref[b, rows, m, :], key_ref[b, rows, m, :]
        from_start_I1 = made.from_start_BNT[b, n, rows][:, None]
        found_JV = from_start_I1 * dot(k_JK, state_KV)
        missing_JV = rate_ref[b, n, rows][:, None] * (value_ref[b, rows, n, own] - found_JV)
        written_JV = dot(made.inverse_BNTJ[b, n, rows, :], missing_JV)
        seen_IV = dot(made.seen_BNTJ[b, n, rows, :], written_JV)
        out_ref[b, rows, n, own] = from_start_I1 * dot(q_IK, state_KV) + seen_IV
        if kept_refs:
            written_ref, states_ref = kept_refs
            written_ref[b, rows, n, own] = written_JV.astype(how.dtype)
            states_ref[b, n, c, :, own] = state_KV.astype(how.dtype)
        kept = made.from_start_BNT[b, n, c * CHUNK + CHUNK - 1]
        return kept * state_KV + dot(k_JK.T, made.to_end_BNT[b, n, rows][:, None] * written_JV)

    left_ref[b, n, :, own] = jax.lax.fori_loop(0, rate_ref.shape[2] // CHUNK, chunk, given_ref[b, n, :, own])


def _backward_kernel(
    query_ref: Any,
    key_ref: Any,
    rate_ref: Any,
    made: Systems,
    d_out_ref: Any,
    d_left_ref: Any,
    d_given_ref: Any,
    d_solved_ref: Any,
    d_states_ref: Any,
    *,
    how: How,
    shared: int,
    columns: int,
) -> None:
    b, n, m, own = _Place.here(shared, columns)
    chunks = rate_ref.shape[2] // CHUNK

    def chunk(step: Any, d_state_KV: jax.Array) -> jax.Array:
        c, dot = chunks - 1 - step, how.dot
        rows = pl.ds(c * CHUNK, CHUNK)
        q_IK, k_JK, d_out_IV = query_ref[b, rows, m, :], key_ref[b, rows, m, :], d_out_ref[b, rows, n, own]
        from_start_I1 = made.from_start_BNT[b, n, rows][:, None]
        d_states_ref[b, n, c, :, own] = d_state_KV.astype(how.dtype)
        d_written_JV = dot(made.seen_BNTJ[b, n, rows, :].T, d_out_IV)
        d_written_JV += made.to_end_BNT[b, n, rows][:, None] * dot(k_JK, d_state_KV)
        d_solved_JV = dot(made.inverse_BNTJ[b, n, rows, :].T, d_written_JV)
        d_solved_ref[b, rows, n, own] = d_solved_JV.astype(how.dtype)
        d_found_JV = from_start_I1 * rate_ref[b, n, rows][:, None] * d_solved_JV
        kept = made.from_start_BNT[b, n, c * CHUNK + CHUNK - 1]
        return kept * d_state_KV + dot(q_IK.T, from_start_I1 * d_out_IV) - dot(k_JK.T, d_found_JV)

    d_given_ref[b, n, :, own] = jax.lax.fori_loop(0, chunks, chunk, d_left_ref[b, n, :, own])
