"""One product after the other. Letters as in the package."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.fused_product.around import Activation, Norm
from maxhydra.kernels.product_chain.weights import Weights


def chain(mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, norm: Norm, activation: Activation) -> jax.Array:
    x_MD = onto_MD + jnp.einsum("ma,da->md", mixed_MA, weights.out_DA)
    gate_MF, up_MF = jnp.split(jnp.einsum("md,fd->mf", norm(x_MD), weights.gate_up_2FD), 2, axis=1)
    wide_MF = activation(gate_MF.astype(jnp.float32)) * up_MF.astype(jnp.float32)
    return x_MD + jnp.einsum("mf,df->md", wide_MF.astype(x_MD.dtype), weights.down_DF)
