"""What stands around a product of few rows, for kernels that do it on the way."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * (scale + offset), in float32."""

    scale_K: jax.Array
    offset: float
    eps: float

    def __call__(self, x_MK: jax.Array) -> jax.Array:
        """In the format of x."""
        wide = x_MK.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (unit * (self.scale_K.astype(jnp.float32) + self.offset)).astype(x_MK.dtype)


class Epilogue(NamedTuple):
    """A norm before the product; after it a gate, or a stream that it is added to."""

    norm: Norm | None = None
    activation: Activation | None = None
    """Of the first half of the outputs, which then multiplies the second half; None: outputs stay as they are."""
    onto_MN: jax.Array | None = None
