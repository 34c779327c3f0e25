"""The oracle: one operation after the other. Shape letters as in the package."""

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.fused_linear.epilogue import Epilogue


def linear(
    x_MK: jax.Array, weight_NK: jax.Array, scales_N: jax.Array | None, epilogue: Epilogue, dtype: np.dtype
) -> jax.Array:
    x_MK = x_MK if epilogue.norm is None else epilogue.norm(x_MK)
    if scales_N is None:
        out_MN = jnp.einsum("mk,nk->mn", x_MK, weight_NK.astype(x_MK.dtype))
    else:
        sums_MN = jnp.einsum("mk,nk->mn", x_MK, weight_NK.astype(x_MK.dtype), preferred_element_type=jnp.float32)
        out_MN = sums_MN * scales_N
    if epilogue.activation is not None:
        gate_MN, value_MN = (half.astype(jnp.float32) for half in jnp.split(out_MN, 2, axis=1))
        out_MN = epilogue.activation(gate_MN) * value_MN
    return out_MN.astype(dtype) if epilogue.residual_MN is None else (out_MN + epilogue.residual_MN).astype(dtype)
