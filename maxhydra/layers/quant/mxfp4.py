"""MXFP4 weights for decoding (Open Compute Project, Microscaling Formats 1.0, 2023): E2M1 codes, and a power of two per
output and GROUP inputs, 4.25 bits per weight.

Weights that came from MXFP4 keep their values. Their codes and scales are the same if the largest code of the group is
4 or 6; otherwise the new scale is smaller, and all values are codes of it too. Exceptions are subnormal float32
numbers, which XLA computes as zero. Inputs are flattened to one dimension, as in INT4.
"""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.grouped_matmul.expert_weights import Matrices, can_pack, pack_mxfp4
from maxhydra.layers.quant.int4 import Shape
from maxhydra.layers.quant.int8 import Quantized, pack_nibbles, unpack_nibbles
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
class Mxfp4Parts:
    """The arrays of an MXFP4 kernel [*leading, inputs, *outputs]."""

    nibbles: jax.Array
    """uint8 [*leading, inputs / 2, *outputs]: codes of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """uint8 [*leading, inputs / GROUP, *outputs]: E8M0 exponents."""

    def kernel(self, dtype: np.dtype, *, leading: int) -> jax.Array:
        """Dequantize to [*leading, inputs, *outputs], exact in bfloat16. Inputs are moved last in between, as in
        INT4."""
        nibbles, scales = (jnp.moveaxis(part, leading, -1) for part in (self.nibbles, self.scales))
        codes = unpack_nibbles(nibbles, nibbles.ndim - 1)
        grouped = code_values(codes).reshape(*scales.shape, -1) * scale_values(scales)[..., None]
        return jnp.moveaxis(grouped.astype(dtype).reshape(codes.shape), -1, leading)


def code_values(codes: jax.Array) -> jax.Array:
    """The values of E2M1 codes in float32."""
    exponent, mantissa = codes >> 1 & 3, codes & 1
    doubled = jnp.where(exponent == 0, mantissa, (2 + mantissa) << jnp.maximum(exponent, 1) - 1).astype(jnp.float32)
    return jnp.where(codes >> 3 == 1, -doubled, doubled) * 0.5


def scale_values(scales: jax.Array) -> jax.Array:
    """The values of E8M0 exponents in float32."""
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


def packed(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of an Mxfp4 module of experts, packed for the kernels of a few rows if they can be."""
    nibbles, scales = arrays["nibbles"], arrays["scales"]
    if not can_pack(2 * nibbles.shape[1], scales.shape[1]):
        return arrays
    matrices = pack_mxfp4(unpack_nibbles(nibbles, 1), scales)
    assert matrices.scales is not None
    return {"nibbles": matrices.values, "scales": matrices.scales}


class Mxfp4(nnx.Module):
    """An MXFP4 kernel [*inputs, *outputs], with leading dimensions of layers and experts if its array had them."""

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, shape: Shape, *, name: str):
        """`axes`: those of the kernel; the axis of the first input is used for the flattened inputs."""
        leading, inputs = shape.stacked + shape.experts, shape.inputs
        self.inputs, self.leading = kernel.shape[leading : leading + inputs], shape.experts
        if math.prod(self.inputs) % GROUP:
            reason = f"{name} has {math.prod(self.inputs)} inputs, but MXFP4 has groups of {GROUP}"
            hint = f"choose quantization.targets whose inputs are multiples of {GROUP}, or quantization=int4_weights"
            raise ConfigError(Problem("quantization.kind", reason, value="mxfp4_weights", hint=hint))
        parts = quantized(kernel, inputs=inputs, leading=leading)
        flat_axes = (*axes[: leading + 1], *axes[leading + inputs :])
        self.nibbles = Quantized(parts.nibbles, axes=flat_axes)
        self.scales = Quantized(parts.scales, axes=flat_axes)

    @property
    def parts(self) -> Mxfp4Parts:
        return Mxfp4Parts(self.nibbles[...], self.scales[...])

    @property
    def packed(self) -> Matrices | None:
        """The experts' kernels if the decode layout has packed them (decode/weight_layout.py)."""
        matrices = Matrices(self.nibbles[...], self.scales[...])
        return matrices if matrices.is_packed else None

    def unpacked(self, parts: Mxfp4Parts, dtype: np.dtype) -> jax.Array:
        """Dequantize to [*inputs, *outputs] of one layer, or of each of its experts."""
        flat = parts.kernel(dtype, leading=self.leading)
        return flat.reshape(*flat.shape[: self.leading], *self.inputs, *flat.shape[self.leading + 1 :])
