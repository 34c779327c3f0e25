"""Normalisation by the root mean square (Zhang and Sennrich, 2019), and by mean and variance (Ba et al., 2016)."""

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.layers.weights import Dtypes, WeightMaker


class RMSNorm(nnx.Module):
    """x / sqrt(mean(x^2) + eps) * scale, in float32 whatever x is: a mean of squares overflows half precision."""

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: WeightMaker):
        self.eps = eps
        self.dtypes = dtypes
        self.scale = make.ones((dim,), ("norm",))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + self.eps)
        return (wide * inverse * self.scale[...].astype(jnp.float32)).astype(self.dtypes.compute)


class LayerNorm(nnx.Module):
    """(x - mean(x)) / sqrt(variance(x) + eps) * scale + bias, in float32."""

    def __init__(self, dim: int, *, eps: float, dtypes: Dtypes, make: WeightMaker):
        self.eps = eps
        self.dtypes = dtypes
        self.scale = make.ones((dim,), ("norm",))
        self.bias = make.zeros((dim,), ("norm",))

    @jax.named_scope("norm")
    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(centred), axis=-1, keepdims=True) + self.eps)
        scale, bias = (vector[...].astype(jnp.float32) for vector in (self.scale, self.bias))
        return (centred * inverse * scale + bias).astype(self.dtypes.compute)
