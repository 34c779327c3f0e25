"""MXFP4 weights for decoding (Open Compute Project, Microscaling Formats 1.0, 2023): E2M1 codes, and a power of two per
output and GROUP inputs, 4.25 bits per weight.

Weights that came from MXFP4 keep their values. Their codes and scales are the same if the largest code of the group is
4 or 6; otherwise the new scale is smaller, and all values are codes of it too. Exceptions are subnormal float32
numbers, which XLA computes as zero.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.grouped_matmul.expert_weights import e2m1_values
from maxhydra.layers.quant.four_bit import FourBit, FourBitParts, Shape
from maxhydra.layers.quant.int8 import pack_nibbles
from maxhydra.sharding import LogicalAxes

GROUP = 32
# Dtype of the scales, which no other format with nibbles has.
SCALE = jnp.uint8
# Magnitudes of the codes 0 to 7, and the exponent of the largest power of two among them. Bit 3 is the sign.
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
LARGEST_EXPONENT = 2
# E8M0: the scale is 2^(byte - 127), 255 is not a number. The smallest scale that is used is a normal float32 number.
SMALLEST, NAN = 1, 255
# Of float32: bits of the mantissa, exponent of infinity and NaN.
MANTISSA_BITS, NOT_FINITE = 23, 255


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4Parts(FourBitParts):
    """E2M1 codes with E8M0 exponents in uint8, one per GROUP inputs. Kernels are exact in bfloat16."""

    @staticmethod
    def code_values(codes: jax.Array) -> jax.Array:
        return e2m1_values(codes)

    @staticmethod
    def scale_values(scales: jax.Array) -> jax.Array:
        values = jax.lax.bitcast_convert_type(scales.astype(jnp.uint32) << MANTISSA_BITS, jnp.float32)
        return jnp.where(scales == NAN, jnp.nan, values)


def quantized(kernel: jax.Array, *, inputs: int, leading: int) -> Mxfp4Parts:
    """Quantize a kernel [*leading, *inputs, *outputs]: scales of the floor of the logarithm of the largest magnitude,
    and the nearest code, of two the even one. A group with infinity or NaN is NaN."""
    before, outputs = kernel.shape[:leading], kernel.shape[leading + inputs :]
    blocks = kernel.reshape(*before, -1, GROUP, *outputs)
    amax = jnp.max(jnp.abs(blocks.astype(jnp.float32)), axis=leading + 1, keepdims=True)
    exponents = jax.lax.bitcast_convert_type(amax, jnp.uint32) >> MANTISSA_BITS & NOT_FINITE
    scales = jnp.maximum(exponents, SMALLEST + LARGEST_EXPONENT) - LARGEST_EXPONENT
    # The inverse of the scale: 2^(127 - byte). The largest byte of a finite group is 252.
    inverse = jax.lax.bitcast_convert_type((254 - scales) << MANTISSA_BITS, jnp.float32)
    codes = nearest_codes(blocks.astype(jnp.float32) * inverse).reshape(*before, -1, *outputs)
    stored_scales = jnp.where(exponents == NOT_FINITE, NAN, scales).astype(SCALE)
    return Mxfp4Parts(pack_nibbles(codes, leading), jnp.squeeze(stored_scales, leading + 1))


def nearest_codes(values: jax.Array) -> jax.Array:
    """The codes of the nearest E2M1 values; larger magnitudes become the largest."""
    magnitudes = jnp.abs(values)
    codes = jnp.zeros(values.shape, jnp.uint8)
    for code, (below, above) in enumerate(itertools.pairwise(MAGNITUDES)):
        middle = (below + above) / 2
        codes += (magnitudes >= middle if code % 2 else magnitudes > middle).astype(jnp.uint8)
    return codes | jnp.signbit(values).astype(jnp.uint8) << 3


def stored(kernel: jax.Array, *, inputs: int, leading: int) -> dict[str, jax.Array]:
    """The arrays of an Mxfp4 module by name."""
    return vars(quantized(kernel, inputs=inputs, leading=leading))


class Mxfp4(FourBit):
    """An MXFP4 kernel."""

    parts_type = Mxfp4Parts

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, shape: Shape, *, name: str):
        inputs = shape.input_sizes(kernel)
        if math.prod(inputs) % GROUP:
            reason = f"{name} has {math.prod(inputs)} inputs, but MXFP4 has groups of {GROUP}"
            hint = f"choose quantization.targets whose inputs are multiples of {GROUP}, or quantization=int4_weights"
            raise ConfigError(Problem("quantization.kind", reason, value="mxfp4_weights", hint=hint))
        super().__init__(quantized(kernel, inputs=shape.inputs, leading=shape.leading), inputs, axes, shape)
