"""Products in float8 for training (Micikevicius et al., 2022): e4m3 forward, where numbers are alike in size, e5m2 for
gradients, which need its range.

An array is scaled as a whole by its own largest number, anew at every use, or by the largest that it had in some steps
before, which need not be waited for. Scales are powers of two, so that scaling rounds nothing. Written as products of
numbers scaled back, which XLA recognises for GPUs that multiply float8, and which means the same wherever there is no
such unit. Those units want both operands with the contracted dimension last, so that every array is needed as it is for
one product and turned for another.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.fp8_matmul import triton

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Scaled(NamedTuple):
    """numbers * scale is the array."""

    numbers: jax.Array
    scale: jax.Array

    def wide(self, dtype: np.dtype) -> jax.Array:
        return self.numbers.astype(dtype) * self.scale.astype(dtype)


def scaled(x: jax.Array, dtype: np.dtype, largest: jax.Array, *, is_alone: bool) -> tuple[Scaled, Scaled]:
    """A matrix in the format, `largest` in the upper half of the format's range; and its transpose."""
    scale = _scale(largest, dtype)
    if is_alone and triton.can_serve(x.shape):
        numbers, turned = triton.rounded(x, scale, dtype, interpret=False)
        return Scaled(numbers, scale), Scaled(turned, scale)
    # Kept from being fused with what makes x: XLA would keep that in float32, and read twice the bytes. The largest
    # number is found on the way.
    numbers = (jax.lax.optimization_barrier(x).astype(jnp.float32) / scale).astype(dtype)
    return Scaled(numbers, scale), Scaled(numbers.T, scale)


def _scale(largest: jax.Array, dtype: np.dtype) -> jax.Array:
    """The power of two that brings a number into the upper half of the format's range; 1 for 0."""
    return jnp.ldexp(jnp.float32(1), jnp.frexp(largest / float(jnp.finfo(dtype).max))[1])


def largest_of(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def float8_product(is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array) -> jax.Array:
    """x times weight; is_alone: on one device, which need not share the arrays with others."""
    return _forward(is_alone, x_MK, weight_KN)[0]


def _forward(is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    x, x_turned = scaled(x_MK, FORWARD, largest_of(x_MK), is_alone=is_alone)
    weight, weight_turned = scaled(weight_KN, FORWARD, largest_of(weight_KN), is_alone=is_alone)
    return _dot(x, weight_turned, x_MK.dtype, precision=None), (x_turned, weight)


def _backward(is_alone: bool, operands: tuple[Scaled, Scaled], d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _gradients(operands, scaled(d_out_MN, BACKWARD, largest_of(d_out_MN), is_alone=is_alone), d_out_MN.dtype)


float8_product.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def delayed_product(is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array, history_3H: jax.Array) -> jax.Array:
    """x times weight, scaled by the largest numbers of x, weight and the product's gradient in so many steps before.

    What is larger becomes the largest number of the format. Without a history scales are 1. The gradient by the history
    is no gradient: its first column holds the largest numbers of this step, for the caller to put in front.
    """
    return _delayed_forward(is_alone, x_MK, weight_KN, history_3H)[0]


def _delayed_forward(
    is_alone: bool, x_MK: jax.Array, weight_KN: jax.Array, history_3H: jax.Array
) -> tuple[jax.Array, tuple]:
    before_3 = jnp.max(history_3H, axis=1)
    x, x_turned = _clipped(x_MK, FORWARD, before_3[0], is_alone=is_alone)
    weight, weight_turned = _clipped(weight_KN, FORWARD, before_3[1], is_alone=is_alone)
    out_MN = _dot(x, weight_turned, x_MK.dtype, precision=None)
    seen_2 = jnp.stack([largest_of(x_MK), largest_of(weight_KN)])
    return out_MN, ((x_turned, weight), before_3[2], seen_2, jnp.zeros_like(history_3H))


def _delayed_backward(is_alone: bool, kept: tuple, d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    operands, before, seen_2, nothing_3H = kept
    d_x, d_weight = _gradients(operands, _clipped(d_out_MN, BACKWARD, before, is_alone=is_alone), d_out_MN.dtype)
    return d_x, d_weight, nothing_3H.at[:, 0].set(jnp.append(seen_2, largest_of(d_out_MN)))


delayed_product.defvjp(_delayed_forward, _delayed_backward)


def _clipped(x: jax.Array, dtype: np.dtype, before: jax.Array, *, is_alone: bool) -> tuple[Scaled, Scaled]:
    """As `scaled`, of numbers that may be larger than those before."""
    most = (float(jnp.finfo(dtype).max) * _scale(before, dtype)).astype(x.dtype)
    return scaled(jnp.clip(x, -most, most), dtype, before, is_alone=is_alone)


def _gradients(
    operands: tuple[Scaled, Scaled], d_out: tuple[Scaled, Scaled], dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Sums of gradients run over every token, and are kept exact: Hopper's fast sums hold 14 bits."""
    (x_turned, weight), (d_out_MN, d_out_NM) = operands, d_out
    d_x = _dot(d_out_MN, weight, dtype, precision=jax.lax.Precision.HIGHEST)
    return d_x, _dot(x_turned, d_out_NM, dtype, precision=jax.lax.Precision.HIGHEST)


def _dot(a: Scaled, b: Scaled, dtype: np.dtype, *, precision: jax.lax.Precision | None) -> jax.Array:
    """Products of the rows of a with the rows of b."""
    last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a.wide(dtype), b.wide(dtype), last, precision=precision, preferred_element_type=dtype)
