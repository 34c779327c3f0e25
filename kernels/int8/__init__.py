"""Products of activations with weights in int8: an output is its sum over codes, times the scale of that output.

The scale of an output does not depend on the input, so that it is multiplied once, after the sum. What few rows take is
the time to read the weights, and a GPU then reads them as they are; more rows, and other devices, have XLA widen the
codes first.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxhydra.kernels.einsum import Layout, projected
from maxhydra.kernels.int8 import triton

__all__ = ["int8_product"]

# Letters for the dimensions of a product; more than any weight has.
INPUTS, OUTPUTS = "abcd", "wxyz"


def int8_product(
    x: jax.Array, codes: jax.Array, scales: jax.Array, *, layout: Layout, is_alone: bool, dtype: DTypeLike | None = None
) -> jax.Array:
    """x [..., *inputs] times codes [*inputs, *outputs] times scales [*outputs], in dtype, or as x is.

    is_alone: on one device, which need not share the arrays with others.
    """
    inputs = codes.ndim - scales.ndim
    rows, dtype = x.shape[: x.ndim - inputs], dtype or x.dtype
    size = math.prod(codes.shape[:inputs])
    if is_alone and layout is Layout.joined and triton.can_serve(math.prod(rows), scales.size, size, x.dtype.name):
        codes_NK = jnp.moveaxis(codes, range(inputs), range(-inputs, 0)).reshape(-1, size)
        out = triton.product(x.reshape(-1, size), codes_NK, scales.reshape(-1), jnp.dtype(dtype), interpret=False)
        return out.reshape(*rows, *scales.shape)
    contracted, left = INPUTS[:inputs], OUTPUTS[: scales.ndim]
    equation = f"...{contracted},{contracted}{left}->...{left}"
    sums = projected(equation, x, codes.astype(x.dtype), layout=layout, dtype=jnp.float32)
    return (sums * scales).astype(dtype)
