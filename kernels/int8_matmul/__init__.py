"""int8 quantization, and int8 matmuls for training: an array is codes times scales, with one scale for all elements
that are summed into the same output.

In the forward pass each row of x and each output of the weight has a scale, so both are applied after the sum. The
backward pass sums over other dimensions: there the scales of the saved operand are multiplied into the gradient before
it is quantized in turn, so the codes of the forward pass are reused and nothing else is saved. Qwix does the same and
is the reference in the tests; it patches modules, whereas models here have a single place that computes matmuls.
"""

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

__all__ = ["QuantizedArray", "int8_matmul", "quantize"]

LARGEST = 127


class QuantizedArray(NamedTuple):
    """codes * scales is the array."""

    codes: jax.Array
    """int8."""
    scales: jax.Array
    """float32, of size 1 in the dimensions that share one."""

    def wide(self, dtype: np.dtype) -> jax.Array:
        return (self.codes.astype(jnp.float32) * self.scales).astype(dtype)


def quantize(x: jax.Array, over: Sequence[int], *, largest: int) -> QuantizedArray:
    """Quantize an array with one scale for the elements along `over`; the largest magnitude becomes `largest`.

    Not `largest` + 0.5, which would use the codes more evenly: every maximum would then fall between two codes, and
    become one or the other by the rounding of its scale, which differs between compiled programs.
    """
    wide = x.astype(jnp.float32)
    scales = jnp.max(jnp.abs(wide), axis=tuple(over), keepdims=True) / largest
    return QuantizedArray(jnp.round(wide / jnp.where(scales > 0, scales, 1)).astype(jnp.int8), scales)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def int8_matmul(keep_gradients: bool, x_MK: jax.Array, weight_KN: jax.Array) -> jax.Array:
    """x times weight in int8; keep_gradients: the backward matmuls use unquantized gradients."""
    return _forward(keep_gradients, x_MK, weight_KN)[0]


def _forward(
    keep_gradients: bool, x_MK: jax.Array, weight_KN: jax.Array
) -> tuple[jax.Array, tuple[QuantizedArray, QuantizedArray]]:
    x, weight = quantize(x_MK, (1,), largest=LARGEST), quantize(weight_KN, (0,), largest=LARGEST)
    sums_MN = _dot(x.codes, weight.codes, (1, 0))
    return (sums_MN * x.scales * weight.scales).astype(x_MK.dtype), (x, weight)


def _backward(
    keep_gradients: bool, operands: tuple[QuantizedArray, QuantizedArray], d_out_MN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    (x, weight), dtype = operands, d_out_MN.dtype
    d_x_MK = _gradient(d_out_MN * weight.scales, weight.codes, (1, 1), keep=keep_gradients, dtype=dtype)
    d_weight_NK = _gradient(d_out_MN * x.scales, x.codes, (0, 0), keep=keep_gradients, dtype=dtype)
    return d_x_MK, d_weight_NK.T


int8_matmul.defvjp(_forward, _backward)


def _gradient(d_out: jax.Array, codes: jax.Array, over: tuple[int, int], *, keep: bool, dtype: np.dtype) -> jax.Array:
    """A gradient times the codes of an operand, contracted over one dimension of each."""
    if keep:
        return _dot(d_out.astype(dtype), codes.astype(dtype), over).astype(dtype)
    d = quantize(d_out, (over[0],), largest=LARGEST)
    return (_dot(d.codes, codes, over) * jnp.moveaxis(d.scales, over[0], -1).reshape(-1, 1)).astype(dtype)


def _dot(a: jax.Array, b: jax.Array, over: tuple[int, int]) -> jax.Array:
    dims = (((over[0],), (over[1],)), ((), ()))
    wide = jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    return jax.lax.dot_general(a, b, dims, preferred_element_type=wide).astype(jnp.float32)
