"""Shared by the Triton kernels: precision, tiles, decays, and the state-independent part of chunks.

The latter is the inverses of the chunks' systems, and the attention of each token to those before it.
"""

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.lax import DotAlgorithmPreset as Algorithm

from maxhydra.kernels.gated_delta.chunked import CHUNK


class Tile(NamedTuple):
    """Tile of a program, and its launch parameters."""

    columns: int
    """Columns of the values, at most; columns of the state are independent."""
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Tiles of all kernels."""

    warps_of_systems: int
    forward: Tile
    backward: Tile
    gradients: Tile


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    dtype: Any
    """Dtype of matmul operands; sums are float32."""
    algorithm: Algorithm
    """Algorithm of matmuls in that dtype."""
    inverse_algorithm: Algorithm
    """Algorithm of the float32 matmuls that compute an inverse."""
    tiles: Tiles
    interpret: bool

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._matmul(a.astype(self.dtype), b.astype(self.dtype), self.algorithm)

    def wide_dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._matmul(a, b, self.inverse_algorithm)

    def _matmul(self, a: jax.Array, b: jax.Array, algorithm: Algorithm) -> jax.Array:
        precision = "highest" if self.interpret else algorithm
        return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


class Decays(NamedTuple):
    """Decay from each token to each later one, from the start to each token, and from each token to the end."""

    pairs_IJ: jax.Array
    from_start_I: jax.Array
    to_end_J: jax.Array


def decays(log_decay_I: jax.Array, resets_I: jax.Array) -> Decays:
    """Zero across a reset. Every pair has its own sum: a difference of two sums would lose most digits."""
    i, j = square_indices()
    is_visible = (i >= j) & (resets_I[:, None] == resets_I[None, :])
    sums_IJ = jnp.cumsum(jnp.where(i > j, log_decay_I[:, None], 0.0), axis=0)
    pairs_IJ = jnp.where(is_visible, jnp.exp(sums_IJ), 0.0)
    from_start_I = jnp.exp(jnp.sum(jnp.where(i >= j, log_decay_I[None, :], 0.0), axis=1))
    to_end_J = jnp.sum(jnp.where(i == CHUNK - 1, pairs_IJ, 0.0), axis=0)
    return Decays(pairs_IJ, jnp.where(resets_I == 0, from_start_I, 0.0), to_end_J)


def square_indices() -> tuple[jax.Array, jax.Array]:
    """Row and column index of each element of a chunk's square matrix."""
    shape = (CHUNK, CHUNK)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)


class Tokens(NamedTuple):
    """Inputs padded to whole chunks. N value heads, ordered by the M key heads that they share."""

    query_BTMK: jax.Array
    key_BTMK: jax.Array
    value_BTNV: jax.Array
    log_decay_BNT: jax.Array
    rate_BNT: jax.Array
    resets_BT: jax.Array
    """Number of resets up to each token within its chunk."""

    @property
    def shared(self) -> int:
        """Value heads per key head."""
        return self.value_BTNV.shape[2] // self.key_BTMK.shape[2]

    @property
    def grid(self) -> tuple[int, int, int]:
        """Chunks, value heads and rows."""
        B, T, N, _ = self.value_BTNV.shape
        return T // CHUNK, N, B


class Systems(NamedTuple):
    """The square matrices of the chunks, row by row, and the decays from the start and to the end of a chunk."""

    inverse_BNTJ: jax.Array
    attention_BNTJ: jax.Array
    from_start_BNT: jax.Array
    to_end_BNT: jax.Array


def systems(params: KernelParams, tokens: Tokens) -> Systems:
    B, T, N, _ = tokens.value_BTNV.shape
    square = jax.ShapeDtypeStruct((B, N, T, CHUNK), params.dtype)
    vector = jax.ShapeDtypeStruct((B, N, T), jnp.float32)
    chunk_systems = pl.pallas_call(
        partial(_kernel, params=params, shared=tokens.shared),
        grid=tokens.grid,
        out_shape=(square, square, vector, vector),
        compiler_params=plt.CompilerParams(num_warps=params.tiles.warps_of_systems, num_stages=1),
        interpret=params.interpret,
        name="gated_delta_systems",
    )(tokens.query_BTMK, tokens.key_BTMK, tokens.log_decay_BNT, tokens.rate_BNT, tokens.resets_BT)
    return Systems(*chunk_systems)


def _kernel(
    query_ref: Any,
    key_ref: Any,
    log_decay_ref: Any,
    rate_ref: Any,
    resets_ref: Any,
    inverse_ref: Any,
    attention_ref: Any,
    from_start_ref: Any,
    to_end_ref: Any,
    *,
    params: KernelParams,
    shared: int,
) -> None:
    c, n, b = (pl.program_id(axis) for axis in range(3))
    rows, m = pl.ds(c * CHUNK, CHUNK), jax.lax.div(n, jnp.int32(shared))
    pairs_IJ, from_start_I, to_end_J = decays(log_decay_ref[b, n, rows], resets_ref[b, rows])
    q_IK, k_JK = query_ref[b, rows, m, :], key_ref[b, rows, m, :]
    i, j = square_indices()
    system_IJ = jnp.where(i > j, rate_ref[b, n, rows][:, None] * params.dot(k_JK, k_JK.T) * pairs_IJ, 0.0)
    inverse_ref[b, n, rows, :] = inverse(params, system_IJ).astype(params.dtype)
    attention_ref[b, n, rows, :] = (params.dot(q_IK, k_JK.T) * pairs_IJ).astype(params.dtype)
    from_start_ref[b, n, rows] = from_start_I
    to_end_ref[b, n, rows] = to_end_J


def inverse(params: KernelParams, system_IJ: jax.Array) -> jax.Array:
    """Invert the identity plus a strictly lower system, by diagonal blocks that double in size.

    Two blocks A and B with C below A and left of B form one with -B^-1 C A^-1 in that place.
    """
    i, j = square_indices()
    inverse_IJ = jnp.where(i == j, 1.0, 0.0)
    for bit in range(CHUNK.bit_length() - 1):
        is_between = (i >> (bit + 1) == j >> (bit + 1)) & (i >> bit != j >> bit)
        between_IJ = jnp.where(is_between, system_IJ, 0.0)
        if bit:
            between_IJ = params.wide_dot(params.wide_dot(inverse_IJ, between_IJ), inverse_IJ)
        inverse_IJ = inverse_IJ - between_IJ
    return inverse_IJ
