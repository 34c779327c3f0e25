"""What chunks are without a state: the inverses of their systems, and how much each token sees of those before it."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.gated_delta.chunked import CHUNK
from maxhydra.kernels.gated_delta.triton.common import How, decays, places


class Tokens(NamedTuple):
    """What is known of the tokens, in whole chunks. N value heads, in the order of the M key heads that they share."""

    query_BTMK: jax.Array
    key_BTMK: jax.Array
    value_BTNV: jax.Array
    log_decay_BNT: jax.Array
    rate_BNT: jax.Array
    resets_BT: jax.Array
    """Starts up to each token within its chunk."""

    @property
    def shared(self) -> int:
        """Value heads of a key head."""
        return self.value_BTNV.shape[2] // self.key_BTMK.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Chunks, value heads and rows."""
        B, T, N, _ = self.value_BTNV.shape
        return T // CHUNK, N, B


class Systems(NamedTuple):
    """The squares of the chunks, row by row, and what is left of the state at each token and of each at the end."""

    inverse_BNTJ: jax.Array
    seen_BNTJ: jax.Array
    from_start_BNT: jax.Array
    to_end_BNT: jax.Array


def systems(how: How, tokens: Tokens) -> Systems:
    B, T, N, _ = tokens.value_BTNV.shape
    square = jax.ShapeDtypeStruct((B, N, T, CHUNK), how.dtype)
    vector = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    made = pl.pallas_call(
        partial(_kernel, how=how, shared=tokens.shared),
        grid=tokens.grid,
        out_shape=(square, square, vector, vector),
        compiler_params=plt.CompilerParams(num_warps=how.tiles.warps_of_systems, num_stages=1),
        interpret=how.interpret,
        name="gated_delta_systems",
    )(tokens.query_BTMK, tokens.key_BTMK, tokens.log_decay_BNT, tokens.rate_BNT, tokens.resets_BT)
    return Systems(*made)


def _kernel(
    query_ref: Any,
    key_ref: Any,
    log_decay_ref: Any,
    rate_ref: Any,
    resets_ref: Any,
    inverse_ref: Any,
    seen_ref: Any,
    from_start_ref: Any,
    to_end_ref: Any,
    *,
    how: How,
    shared: int,
) -> None:
    c, n, b = (pl.program_id(axis) for axis in range(3))
    rows, m = pl.ds(c * CHUNK, CHUNK), jax.lax.div(n, jnp.int32(shared))
    pairs_IJ, from_start_I, to_end_J = decays(log_decay_ref[b, n, rows], resets_ref[b, rows])
    q_IK, k_JK = query_ref[b, rows, m, :], key_ref[b, rows, m, :]
    i, j = places()
    system_IJ = jnp.where(i > j, rate_ref[b, n, rows][:, None] * how.dot(k_JK, k_JK.T) * pairs_IJ, 0.0)
    inverse_ref[b, n, rows, :] = inverse(how, system_IJ).astype(how.dtype)
    seen_ref[b, n, rows, :] = (how.dot(q_IK, k_JK.T) * pairs_IJ).astype(how.dtype)
    from_start_ref[b, n, rows] = from_start_I
    to_end_ref[b, n, rows] = to_end_J


def inverse(how: How, system_IJ: jax.Array) -> jax.Array:
    """Of the identity plus the system, which is strictly lower: of blocks on the diagonal, of twice the size each time.

    Two blocks A and B with C below A and left of B make one with -B^-1 C A^-1 there.
    """
    i, j = places()
    found_IJ = jnp.where(i == j, 1.0, 0.0)
    for bit in range(CHUNK.bit_length() - 1):
        is_between = (i >> (bit + 1) == j >> (bit + 1)) & (i >> bit != j >> bit)
        between_IJ = jnp.where(is_between, system_IJ, 0.0)
        if bit:
            between_IJ = how.wide_dot(how.wide_dot(found_IJ, between_IJ), found_IJ)
        found_IJ = found_IJ - between_IJ
    return found_IJ
