"""One product after the other. Letters as in the package."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.fused_product.around import Activation, Norm
from maxhydra.kernels.product_chain.weights import Weights


def chain(
    mixed_MA: jax.Array, onto_MD: jax.Array, weights: Weights, norms: tuple[Norm, ...], activation: Activation
) -> tuple[jax.Array, jax.Array | None]:
    x_MD = onto_MD + jnp.einsum("ma,da->md", mixed_MA, weights.out_DA)
    gate_MF, up_MF = jnp.split(jnp.einsum("md,fd->mf", norms[0](x_MD), weights.gate_up_2FD), 2, axis=1)
    wide_MF = activation(gate_MF.astype(jnp.float32)) * up_MF.astype(jnp.float32)
    x_MD = x_MD + jnp.einsum("mf,df->md", wide_MF.astype(x_MD.dtype), weights.down_DF)
    if weights.heads_QD is None:
        return x_MD, None
    return x_MD, jnp.einsum("md,qd->mq", norms[1](x_MD), weights.heads_QD)
