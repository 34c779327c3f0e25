"""Root mean square normalisation (Zhang and Sennrich, 2019)."""

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
