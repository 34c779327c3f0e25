"""Matrix products whose result is wider than their inputs, such as logits in float32 from bfloat16 activations."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def widening_einsum(equation: str, a: jax.Array, b: jax.Array, *, dtype: DTypeLike) -> jax.Array:
    """einsum of a and b, accumulated and returned in dtype.

    The gradient arrives in the wide type. Left alone, the two products of the backward pass would then run wholly in
    float32, at a fraction of the speed of the forward pass; it is rounded once to the inputs' type instead.
    """
    dtype = jnp.dtype(dtype)
    if a.dtype == b.dtype and dtype.itemsize > a.dtype.itemsize:
        return _widening(equation, dtype, a, b)
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _widening(equation: str, dtype: np.dtype, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(equation, a, b, preferred_element_type=dtype)


def _forward(equation: str, dtype: np.dtype, a: jax.Array, b: jax.Array) -> tuple[jax.Array, tuple]:
    return _widening(equation, dtype, a, b), (a, b)


def _backward(equation: str, dtype: np.dtype, inputs: tuple, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    _, pull_back = jax.vjp(partial(jnp.einsum, equation), *inputs)
    return pull_back(cotangent.astype(inputs[0].dtype))


_widening.defvjp(_forward, _backward)
