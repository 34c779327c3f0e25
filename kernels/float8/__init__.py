"""Products in float8 for training (Micikevicius et al., 2022): e4m3 forward, where numbers are alike in size, e5m2 for
gradients, which need its range.

An array is scaled as a whole by its own largest number, anew at every use. Scales are powers of two, so that scaling
rounds nothing. Written as products of numbers scaled back, which XLA recognises for GPUs that multiply float8, and
which means the same wherever there is no such unit. Those units want both operands with the contracted dimension last,
so that every array is needed as it is for one product and turned for another.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.float8 import triton

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Scaled(NamedTuple):
    """numbers * scale is the array."""

    numbers: jax.Array
    scale: jax.Array

    def wide(self, dtype: np.dtype) -> jax.Array:
        return self.numbers.astype(dtype) * self.scale.astype(dtype)


def scaled(x: jax.Array, dtype: np.dtype, *, is_alone: bool) -> tuple[Scaled, Scaled]:
    """A matrix in the format, its largest number in the upper half of the format's range; and its transpose."""
    largest = jnp.max(jnp.abs(x)).astype(jnp.float32)
    _, exponent = jnp.frexp(largest / float(jnp.finfo(dtype).max))
    scale = jnp.ldexp(jnp.float32(1), exponent)
    if is_alone and triton.can_serve(x.shape):
        numbers, turned = triton.rounded(x, scale, dtype, interpret=False)
        return Scaled(numbers, scale), Scaled(turned, scale)
    # Kept from being fused with what makes x: XLA would keep that in float32, and read twice the bytes. The largest
    # number is found on the way.
    numbers = (jax.lax.optimization_barrier(x).astype(jnp.float32) / scale).astype(dtype)
    return Scaled(numbers, scale), Scaled(numbers.T, scale)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_product(is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array) -> jax.Array:
    """x times weight; is_alone: on one device, which need not share the arrays with others."""
    return _forward(is_alone, x_MK, weight_KN)[0]


def _forward(is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    x, x_turned = scaled(x_MK, FORWARD, is_alone=is_alone)
    weight, weight_turned = scaled(weight_KN, FORWARD, is_alone=is_alone)
    return _dot(x, weight_turned, x_MK.dtype, precision=None), (x_turned, weight)


def _backward(is_alone: bool, operands: tuple[Scaled, Scaled], d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums of gradients run over every token, and are kept exact: Hopper's fast sums hold 14 bits."""
    x_turned, weight = operands
    d_out, d_out_turned = scaled(d_out_MN, BACKWARD, is_alone=is_alone)
    d_x = _dot(d_out, weight, d_out_MN.dtype, precision=jax.lax.Precision.HIGHEST)
    return d_x, _dot(x_turned, d_out_turned, d_out_MN.dtype, precision=jax.lax.Precision.HIGHEST)


float8_product.defvjp(_forward, _backward)


def _dot(a: Scaled, b: Scaled, dtype: np.dtype, *, precision: jax.lax.Precision | None) -> jax.Array:
    """Products of the rows of a with the rows of b."""
    last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a.wide(dtype), b.wide(dtype), last, precision=precision, preferred_element_type=dtype)
