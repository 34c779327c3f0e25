"""Matmuls of activations with int8 weights: an output is its sum over codes, times the scale of that output.

The scale of an output does not depend on the input, so it is applied once, after the sum. With few rows the time is
that of reading the weights, and the GPU kernels read the codes directly; with more rows, and on other devices, XLA
converts the codes first.
"""

import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from maxhydra.kernels.fused_linear import Epilogue, fused_linear
from maxhydra.kernels.int8_weight_matmul import triton
from maxhydra.kernels.matmul import Layout, project

__all__ = ["int8_weight_matmul"]

# Einsum letters for the dimensions of the weight; more than any weight has.
INPUTS, OUTPUTS = "abcd", "wxyz"


def int8_weight_matmul(
    x: jax.Array,
    codes: jax.Array,
    scales: jax.Array,
    *,
    layout: Layout,
    is_single_device: bool,
    dtype: DTypeLike | None = None,
) -> jax.Array:
    """x [..., *inputs] times codes [*inputs, *outputs] times scales [*outputs], in `dtype` (default: that of x).

    is_alone: on one device, so that single-device kernels can be used.
    """
    inputs = codes.ndim - scales.ndim
    rows, dtype = x.shape[: x.ndim - inputs], dtype or x.dtype
    size, count = math.prod(codes.shape[:inputs]), math.prod(rows)
    has_kernel = count == 1 or triton.is_supported(count, scales.size, size, x.dtype.name)
    if is_single_device and layout is Layout.joined and has_kernel:
        codes_NK = jnp.moveaxis(codes, range(inputs), range(-inputs, 0)).reshape(-1, size)
        x_MK, scales_N, dtype = x.reshape(-1, size), scales.reshape(-1), jnp.dtype(dtype)
        if count == 1:
            out_MN = fused_linear(x_MK, codes_NK, scales_N, Epilogue(), dtype=dtype)
        else:
            out_MN = triton.small_batch_matmul(x_MK, codes_NK, scales_N, dtype, interpret=False)
        return out_MN.reshape(*rows, *scales.shape)
    contracted, outputs = INPUTS[:inputs], OUTPUTS[: scales.ndim]
    equation = f"...{contracted},{contracted}{outputs}->...{outputs}"
    sums = project(equation, x, codes.astype(x.dtype), layout=layout, dtype=jnp.float32)
    return (sums * scales).astype(dtype)
