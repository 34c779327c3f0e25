"""INT4 weights for decoding: integers from -7 to 7, and one scale per output and group of inputs.

Inputs are flattened to one dimension, so groups need not align with heads. With groups of 64, 4.5 bits per weight.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.grouped_matmul.expert_weights import Matrices, can_pack, pack_int4
from maxhydra.kernels.int8_matmul import QuantizedArray, quantize
from maxhydra.layers.quant.int8 import Quantized, pack_nibbles, unpack_nibbles
from maxhydra.sharding import LogicalAxes

LARGEST = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Parts:
    """The arrays of an INT4 kernel [*leading, inputs, *outputs]."""

    nibbles: jax.Array
    """uint8 [*leading, inputs / 2, *outputs]: codes of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """float32 [*leading, groups, *outputs]."""

    def kernel(self, dtype: np.dtype, *, leading: int) -> jax.Array:
        """Dequantize to [*leading, inputs, *outputs], multiplied in float32 and rounded once.

        Inputs are moved last in between: GPU decoding stores them last, so nothing is transposed there.
        """
        nibbles, scales = (jnp.moveaxis(part, leading, -1) for part in (self.nibbles, self.scales))
        codes = (unpack_nibbles(nibbles, nibbles.ndim - 1).astype(jnp.int8) ^ 8) - 8
        grouped = codes.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
        return jnp.moveaxis(grouped.astype(dtype).reshape(codes.shape), -1, leading)


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


def packed(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays of an Int4 module of experts, packed for the kernels of a few rows if they take such groups."""
    nibbles, scales = arrays["nibbles"], arrays["scales"]
    if not can_pack(2 * nibbles.shape[1], scales.shape[1]):
        return arrays
    matrices = pack_int4(unpack_nibbles(nibbles, 1), scales)
    return {"nibbles": matrices.values, "scales": scales}


class Int4(nnx.Module):
    """An INT4 kernel [*inputs, *outputs], with leading dimensions of layers and experts if its array had them."""

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, shape: "Shape", *, group: int | None, name: str):
        """`axes`: those of the kernel; the axis of the first input is used for the flattened inputs."""
        leading, inputs = shape.stacked + shape.experts, shape.inputs
        self.inputs, self.leading = kernel.shape[leading : leading + inputs], shape.experts
        groups = groups_of(math.prod(self.inputs), group, name)
        parts = quantized(kernel, inputs=inputs, leading=leading, groups=groups)
        flat_axes = (*axes[: leading + 1], *axes[leading + inputs :])
        self.nibbles = Quantized(parts.nibbles, axes=flat_axes)
        self.scales = Quantized(parts.scales, axes=flat_axes)

    @property
    def parts(self) -> Int4Parts:
        return Int4Parts(self.nibbles[...], self.scales[...])

    @property
    def packed(self) -> Matrices | None:
        """The experts' kernels if the decode layout has packed them (decode/weight_layout.py)."""
        matrices = Matrices(self.nibbles[...], self.scales[...])
        return matrices if matrices.is_packed else None

    def unpacked(self, parts: Int4Parts, dtype: np.dtype) -> jax.Array:
        """Dequantize to [*inputs, *outputs] of one layer, or of each of its experts."""
        flat = parts.kernel(dtype, leading=self.leading)
        return flat.reshape(*flat.shape[: self.leading], *self.inputs, *flat.shape[self.leading + 1 :])


class Shape(NamedTuple):
    """Number of dimensions of each role in a kernel, in this order; the rest are outputs."""

    stacked: int
    experts: int
    inputs: int


def groups_of(inputs: int, group: int | None, name: str) -> int:
    """Number of groups of this size; ConfigError if they do not divide the inputs."""
    group = group or inputs
    if inputs % group or group % 2:
        reason = f"{name} has {inputs} inputs, which are not divisible into groups of an even size {group}"
        hint = "choose another quantization.group, or other quantization.targets"
        raise ConfigError(Problem("quantization.group", reason, value=group, hint=hint))
    return inputs // group
