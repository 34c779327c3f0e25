"""Shared by the Triton kernels: matmul precision, tiles, and the decays within a chunk."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
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
