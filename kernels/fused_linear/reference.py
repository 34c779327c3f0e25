"""The oracle: one operation after the other. Shape letters as in the package."""

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.fused_linear.epilogue import Epilogue


def product(
    x_MK: jax.Array, weight_NK: jax.Array, scales_N: jax.Array | None, around: Epilogue, dtype: np.dtype
) -> jax.Array:
    x_MK = x_MK if around.norm is None else around.norm(x_MK)
    if scales_N is None:
        out_MN = jnp.einsum("mk,nk->mn", x_MK, weight_NK.astype(x_MK.dtype))
    else:
        sums_MN = jnp.einsum("mk,nk->mn", x_MK, weight_NK.astype(x_MK.dtype), preferred_element_type=jnp.float32)
        out_MN = sums_MN * scales_N
    if around.activation is not None:
        gate_MN, value_MN = (half.astype(jnp.float32) for half in jnp.split(out_MN, 2, axis=1))
        out_MN = around.activation(gate_MN) * value_MN
    return out_MN.astype(dtype) if around.onto_MN is None else (out_MN + around.onto_MN).astype(dtype)
