"""Operations fused into a matmul of a few rows: a norm of its input, and an epilogue on its output."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

Activation = Callable[[jax.Array], jax.Array]


class NormParams(NamedTuple):
    """RMSNorm: x / sqrt(mean(x^2) + eps) * (scale + offset), in float32."""

    scale_K: jax.Array
    offset: float
    eps: float

    def __call__(self, x_MK: jax.Array) -> jax.Array:
        """The norm in the dtype of x."""
        wide = x_MK.astype(jnp.float32)
        unit = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (unit * (self.scale_K.astype(jnp.float32) + self.offset)).astype(x_MK.dtype)


class Epilogue(NamedTuple):
    """A norm before the matmul; after it a gated activation, or the residual that the output is added to."""

    norm: NormParams | None = None
    activation: Activation | None = None
    """Applied to the first half of the outputs, which then multiplies the second half; None: outputs are plain."""
    residual_MN: jax.Array | None = None
