"""Weights kept in int8 for decoding, where a step costs what it reads: each output has a scale of its own."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

LARGEST = 127


class Narrow(NamedTuple):
    """numbers * scale is about the weight; outputs come first."""

    numbers: jax.Array
    scale: jax.Array


def narrowed(weight: jax.Array, *, inputs: int) -> Narrow:
    """The nearest of 255 evenly spaced numbers, by each output's largest weight; the last dimensions are inputs."""
    wide = weight.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=tuple(range(-inputs, 0))) / LARGEST
    spread = _beside(jnp.where(scale == 0, 1, scale), wide)
    return Narrow(jnp.round(wide / spread).astype(jnp.int8), scale.astype(jnp.float32))


def widened(weight: jax.Array | Narrow, *, dtype: np.dtype) -> jax.Array:
    """A weight as products take it."""
    if not isinstance(weight, Narrow):
        return weight
    return weight.numbers.astype(dtype) * _beside(weight.scale, weight.numbers).astype(dtype)


def _beside(scale: jax.Array, weight: jax.Array) -> jax.Array:
    """A scale of outputs against all dimensions."""
    return scale.reshape(*scale.shape, *(1,) * (weight.ndim - scale.ndim))
