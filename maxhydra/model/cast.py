"""Weights of stacked layers in another number format."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def cast_by_layer(wide: np.dtype, narrow: np.dtype, stack: jax.Array) -> jax.Array:
    """A stack of layers that is kept in one format, in another.

    Its gradient is cast layer by layer. Where the layers are written out, their gradients come one by one, and the
    stack of them is only ever a name: who looks at a single layer of it, as the gradient norm does, reads that layer.
    """
    return stack.astype(narrow)


def _forward(wide: np.dtype, narrow: np.dtype, stack: jax.Array) -> tuple[jax.Array, None]:
    return stack.astype(narrow), None


def _backward(wide: np.dtype, narrow: np.dtype, kept: None, d_stack: jax.Array) -> tuple[jax.Array]:
    return (jnp.concatenate([d_stack[i : i + 1].astype(wide) for i in range(d_stack.shape[0])]),)


cast_by_layer.defvjp(_forward, _backward)
