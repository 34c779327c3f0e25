"""What the kernels for GPUs have in common: formats of products, tiles, and what decays leave within a chunk."""

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import DotAlgorithmPreset as Algorithm

from maxhydra.kernels.gated_delta.chunked import CHUNK


class Tile(NamedTuple):
    """What a program makes, and how."""

    columns: int
    """Of the values, as many as there are at most; the state's columns need nothing of each other."""
    warps: int
    stages: int


class Tiles(NamedTuple):
    """Of each kernel."""

    warps_of_systems: int
    forward: Tile
    backward: Tile
    gradients: Tile


@dataclasses.dataclass(frozen=True)
class How:
    """What is known when the kernels are compiled."""

    dtype: Any
    """Of what enters a product; sums are float32."""
    algorithm: Algorithm
    """Of a product in that format."""
    of_inverse: Algorithm
    """Of a product on the way to an inverse, which is in float32."""
    tiles: Tiles
    interpret: bool

    def dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._product(a.astype(self.dtype), b.astype(self.dtype), self.algorithm)

    def wide_dot(self, a: jax.Array, b: jax.Array) -> jax.Array:
        return self._product(a, b, self.of_inverse)

    def _product(self, a: jax.Array, b: jax.Array, algorithm: Algorithm) -> jax.Array:
        precision = "highest" if self.interpret else algorithm
        return jnp.dot(a, b, precision=precision, preferred_element_type=jnp.float32)


class Decays(NamedTuple):
    """What is left of a token at a later one, of the state at each, and of each at the end."""

    pairs_IJ: jax.Array
    from_start_I: jax.Array
    to_end_J: jax.Array


def decays(log_decay_I: jax.Array, resets_I: jax.Array) -> Decays:
    """Nothing is left across a start. Every pair has a sum of its own: a difference of two would leave few digits."""
    i, j = places()
    is_seen = (i >= j) & (resets_I[:, None] == resets_I[None, :])
    sums_IJ = jnp.cumsum(jnp.where(i > j, log_decay_I[:, None], 0.0), axis=0)
    pairs_IJ = jnp.where(is_seen, jnp.exp(sums_IJ), 0.0)
    from_start_I = jnp.exp(jnp.sum(jnp.where(i >= j, log_decay_I[None, :], 0.0), axis=1))
    to_end_J = jnp.sum(jnp.where(i == CHUNK - 1, pairs_IJ, 0.0), axis=0)
    return Decays(pairs_IJ, jnp.where(resets_I == 0, from_start_I, 0.0), to_end_J)


def places() -> tuple[jax.Array, jax.Array]:
    """Row and column of each number of a chunk's square."""
    shape = (CHUNK, CHUNK)
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0), jax.lax.broadcasted_iota(jnp.int32, shape, 1)
