"""FP8 matmuls for training (Micikevicius et al., 2022): e4m3 in the forward pass, e5m2, which has more range, for
gradients.

Scaling is per tensor, by the current amax at every use, or by the amax of previous steps (delayed scaling), which does
not have to be waited for. Scales are powers of two, so scaling is exact. The matmul is written with dequantized
operands, a pattern that XLA rewrites to an FP8 GEMM on GPUs that have one and that gives the same result elsewhere. FP8
GEMMs need the contracted dimension last in both operands, so every array is needed both plain and transposed.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.fp8_matmul import triton

FORWARD, BACKWARD = jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)


class Quantized(NamedTuple):
    """numbers * scale is the array."""

    values: jax.Array
    scale: jax.Array

    def dequantize(self, dtype: np.dtype) -> jax.Array:
        return self.values.astype(dtype) * self.scale.astype(dtype)


def quantize(x: jax.Array, dtype: np.dtype, amax: jax.Array, *, is_single_device: bool) -> tuple[Quantized, Quantized]:
    """Quantize a matrix and its transpose, with `amax` mapped to the upper half of the format's range."""
    scale = _scale(amax, dtype)
    if is_single_device and triton.is_supported(x.shape):
        values, transposed = triton.quantize(x, scale, dtype, interpret=False)
        return Quantized(values, scale), Quantized(transposed, scale)
    # The barrier prevents fusion with the producer of x: XLA would keep x in float32 and read twice the bytes. The amax
    # is computed in the same pass.
    values = (jax.lax.optimization_barrier(x).astype(jnp.float32) / scale).astype(dtype)
    return Quantized(values, scale), Quantized(values.T, scale)


def _scale(amax: jax.Array, dtype: np.dtype) -> jax.Array:
    """The power of two that maps `amax` to the upper half of the format's range; 1 for 0."""
    return jnp.ldexp(jnp.float32(1), jnp.frexp(amax / float(jnp.finfo(dtype).max))[1])


def amax_of(x: jax.Array) -> jax.Array:
    return jnp.max(jnp.abs(x)).astype(jnp.float32)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_matmul(is_single_device: bool, x_MK: jax.Array, weight_KN: jax.Array) -> jax.Array:
    """x times weight with current scaling; is_alone: on one device, so that single-device kernels can be used."""
    return _forward(is_single_device, x_MK, weight_KN)[0]


def _forward(
    is_single_device: bool, x_MK: jax.Array, weight_KN: jax.Array
) -> tuple[jax.Array, tuple[Quantized, Quantized]]:
    x, x_transposed = quantize(x_MK, FORWARD, amax_of(x_MK), is_single_device=is_single_device)
    weight, weight_transposed = quantize(weight_KN, FORWARD, amax_of(weight_KN), is_single_device=is_single_device)
    return _dot(x, weight_transposed, x_MK.dtype, precision=None), (x_transposed, weight)


def _backward(
    is_single_device: bool, operands: tuple[Quantized, Quantized], d_out_MN: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _gradients(
        operands, quantize(d_out_MN, BACKWARD, amax_of(d_out_MN), is_single_device=is_single_device), d_out_MN.dtype
    )


fp8_matmul.defvjp(_forward, _backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp8_matmul_delayed(
    is_single_device: bool, x_MK: jax.Array, weight_KN: jax.Array, history_3H: jax.Array
) -> jax.Array:
    """x times weight with delayed scaling: scales come from the amax history of x, weight and the output's gradient.

    Larger values are clipped to the format's maximum. Scales are 1 without a history. The cotangent of the history is
    not a gradient: its first column holds the amax values of this step, for the caller to prepend to the history.
    """
    return _delayed_forward(is_single_device, x_MK, weight_KN, history_3H)[0]


def _delayed_forward(
    is_single_device: bool, x_MK: jax.Array, weight_KN: jax.Array, history_3H: jax.Array
) -> tuple[jax.Array, tuple]:
    amax_3 = jnp.max(history_3H, axis=1)
    x, x_transposed = _clip_and_quantize(x_MK, FORWARD, amax_3[0], is_single_device=is_single_device)
    weight, weight_transposed = _clip_and_quantize(weight_KN, FORWARD, amax_3[1], is_single_device=is_single_device)
    out_MN = _dot(x, weight_transposed, x_MK.dtype, precision=None)
    new_amax_2 = jnp.stack([amax_of(x_MK), amax_of(weight_KN)])
    return out_MN, ((x_transposed, weight), amax_3[2], new_amax_2, jnp.zeros_like(history_3H))


def _delayed_backward(
    is_single_device: bool, residuals: tuple, d_out_MN: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    operands, amax, new_amax_2, zeros_3H = residuals
    d_x, d_weight = _gradients(
        operands, _clip_and_quantize(d_out_MN, BACKWARD, amax, is_single_device=is_single_device), d_out_MN.dtype
    )
    return d_x, d_weight, zeros_3H.at[:, 0].set(jnp.append(new_amax_2, amax_of(d_out_MN)))


fp8_matmul_delayed.defvjp(_delayed_forward, _delayed_backward)


def _clip_and_quantize(
    x: jax.Array, dtype: np.dtype, amax: jax.Array, *, is_single_device: bool
) -> tuple[Quantized, Quantized]:
    """As `quantize`, for values that may exceed the earlier amax."""
    limit = (float(jnp.finfo(dtype).max) * _scale(amax, dtype)).astype(x.dtype)
    return quantize(jnp.clip(x, -limit, limit), dtype, amax, is_single_device=is_single_device)


def _gradients(
    operands: tuple[Quantized, Quantized], d_out: tuple[Quantized, Quantized], dtype: np.dtype
) -> tuple[jax.Array, jax.Array]:
    """Gradients are accumulated over all tokens in full precision: Hopper's fast accumulation keeps only 14 bits."""
    (x_transposed, weight), (d_out_MN, d_out_NM) = operands, d_out
    d_x = _dot(d_out_MN, weight, dtype, precision=jax.lax.Precision.HIGHEST)
    return d_x, _dot(x_transposed, d_out_NM, dtype, precision=jax.lax.Precision.HIGHEST)


def _dot(a: Quantized, b: Quantized, dtype: np.dtype, *, precision: jax.lax.Precision | None) -> jax.Array:
    """a times the transpose of b."""
    last = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        a.dequantize(dtype), b.dequantize(dtype), last, precision=precision, preferred_element_type=dtype
    )
