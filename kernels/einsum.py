"""Matrix products whose result is wider than their inputs, such as logits in float32 from bfloat16 activations."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike


def widening_einsum(equation: str, a: jax.Array, b: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """einsum of a and b, accumulated and returned in dtype.

    The gradient arrives in the wide type. Left alone, the two products of the backward pass would then run wholly in
    float32, at a fraction of the speed of the forward pass; naming the algorithm keeps bfloat16 inputs with float32
    sums in both directions.
    """
    is_bfloat16 = a.dtype == b.dtype == jnp.bfloat16 and jnp.dtype(dtype) == jnp.float32
    precision = jax.lax.DotAlgorithmPreset.BF16_BF16_F32 if is_bfloat16 else None
    return jnp.einsum(equation, a, b, precision=precision, preferred_element_type=jnp.dtype(dtype))
