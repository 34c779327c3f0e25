"""INT4 weights for decoding: integers from -7 to 7, and one scale per output and group of inputs.

With groups of 64, 4.5 bits per weight.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.int8_matmul import QuantizedArray, quantize
from maxhydra.layers.quant.four_bit import FourBit, FourBitParts, Shape
from maxhydra.layers.quant.int8 import pack_nibbles
from maxhydra.sharding import LogicalAxes

LARGEST = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Parts(FourBitParts):
    """Codes in two's complement with float32 scales."""

    @staticmethod
    def code_values(codes: jax.Array) -> jax.Array:
        return ((codes.astype(jnp.int8) ^ 8) - 8).astype(jnp.float32)

    @staticmethod
    def scale_values(scales: jax.Array) -> jax.Array:
        return scales


def rounded_weight(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> jax.Array:
    """The kernel after quantization and dequantization, in its own dtype."""
    return _round(kernel, inputs, leading, groups).wide(kernel.dtype).reshape(kernel.shape)


def quantized(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> Int4Parts:
    """Quantize a kernel [*leading, *inputs, *outputs] with this many groups per output."""
    codes, scales = _round(kernel, inputs, leading, groups)
    flat = codes.reshape(*kernel.shape[:leading], -1, *kernel.shape[leading + inputs :])
    return Int4Parts(pack_nibbles(flat, leading), jnp.squeeze(scales, leading + 1))


def _round(kernel: jax.Array, inputs: int, leading: int, groups: int) -> QuantizedArray:
    """Codes and scales, shaped [*leading, groups, inputs of a group, *outputs]."""
    before, outputs = kernel.shape[:leading], kernel.shape[leading + inputs :]
    return quantize(kernel.reshape(*before, groups, -1, *outputs), (leading + 1,), largest=LARGEST)


def stored(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> dict[str, jax.Array]:
    """The arrays of an Int4 module by name."""
    return vars(quantized(kernel, inputs=inputs, leading=leading, groups=groups))


class Int4(FourBit):
    """An INT4 kernel."""

    parts_type = Int4Parts

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, shape: Shape, *, group: int | None, name: str):
        inputs = shape.input_sizes(kernel)
        groups = groups_of(math.prod(inputs), group, name)
        parts = quantized(kernel, inputs=shape.inputs, leading=shape.leading, groups=groups)
        super().__init__(parts, inputs, axes, shape)


def groups_of(inputs: int, group: int | None, name: str) -> int:
    """Number of groups of this size; ConfigError if they do not divide the inputs."""
    group = group or inputs
    if inputs % group or group % 2:
        reason = f"{name} has {inputs} inputs, which are not divisible into groups of an even size {group}"
        hint = "choose another quantization.group, or other quantization.targets"
        raise ConfigError(Problem("quantization.group", reason, value=group, hint=hint))
    return inputs // group
