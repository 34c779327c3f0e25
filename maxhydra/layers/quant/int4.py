"""Weights in four bits for decoding: integers from -7 to 7, and a scale for each group of inputs of an output.

Inputs are one dimension here, so that groups need not end where a head does. With groups of 64, 4.5 bits a weight.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.kernels.int8_matmul import Rounded, rounded
from maxhydra.layers.quant.pack_bits import Quantized, paired, parted
from maxhydra.sharding import LogicalAxes

LARGEST = 7


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int4Parts:
    """A kernel [*leading, inputs, *outputs] in four bits."""

    nibbles: jax.Array
    """uint8 [*leading, inputs / 2, *outputs]: codes of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """float32 [*leading, groups, *outputs]."""

    def kernel(self, dtype: np.dtype, *, leading: int) -> jax.Array:
        """[*leading, inputs, *outputs], multiplied in float32 and rounded once.

        With inputs last on the way: that is how they lie in memory where a GPU decodes, and nothing is turned there.
        """
        nibbles, scales = (jnp.moveaxis(part, leading, -1) for part in (self.nibbles, self.scales))
        codes = (parted(nibbles, nibbles.ndim - 1).astype(jnp.int8) ^ 8) - 8
        grouped = codes.reshape(*scales.shape, -1).astype(jnp.float32) * scales[..., None]
        return jnp.moveaxis(grouped.astype(dtype).reshape(codes.shape), -1, leading)


def rounded_weight(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> jax.Array:
    """What such a kernel becomes, in its own number format."""
    return _rounded(kernel, inputs, leading, groups).wide(kernel.dtype).reshape(kernel.shape)


def quantized(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> Int4Parts:
    """A kernel [*leading, *inputs, *outputs] in four bits, so many groups for each output."""
    codes, scales = _rounded(kernel, inputs, leading, groups)
    flat = codes.reshape(*kernel.shape[:leading], -1, *kernel.shape[leading + inputs :])
    return Int4Parts(paired(flat, leading), jnp.squeeze(scales, leading + 1))


def _rounded(kernel: jax.Array, inputs: int, leading: int, groups: int) -> Rounded:
    """[*leading, groups, inputs of a group, *outputs]."""
    before, outputs = kernel.shape[:leading], kernel.shape[leading + inputs :]
    return rounded(kernel.reshape(*before, groups, -1, *outputs), (leading + 1,), largest=LARGEST)


def stored(kernel: jax.Array, *, inputs: int, leading: int, groups: int) -> dict[str, jax.Array]:
    """The arrays of an Int4 by name."""
    return vars(quantized(kernel, inputs=inputs, leading=leading, groups=groups))


class Int4(nnx.Module):
    """A kernel [*inputs, *outputs] in four bits; stacked over layers or not, with a dimension of experts or without, as
    its array was."""

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, shape: "Shape", *, group: int | None, name: str):
        """`axes` as those of the kernel, the first input's standing for all inputs."""
        leading, inputs = shape.stacked + shape.experts, shape.inputs
        self.inputs, self.leading = kernel.shape[leading : leading + inputs], shape.experts
        groups = groups_of(math.prod(self.inputs), group, name)
        parts = quantized(kernel, inputs=inputs, leading=leading, groups=groups)
        own_axes = (*axes[: leading + 1], *axes[leading + inputs :])
        self.nibbles = Quantized(parts.nibbles, axes=own_axes)
        self.scales = Quantized(parts.scales, axes=own_axes)

    @property
    def parts(self) -> Int4Parts:
        return Int4Parts(self.nibbles[...], self.scales[...])

    def unpacked(self, parts: Int4Parts, dtype: np.dtype) -> jax.Array:
        """[*inputs, *outputs] of one layer, or of each of its experts."""
        flat = parts.kernel(dtype, leading=self.leading)
        return flat.reshape(*flat.shape[: self.leading], *self.inputs, *flat.shape[self.leading + 1 :])


class Shape(NamedTuple):
    """What the dimensions of a kernel are, in this order; the rest are outputs."""

    stacked: int
    experts: int
    inputs: int


def groups_of(inputs: int, group: int | None, name: str) -> int:
    """Groups of so many inputs each; ConfigError where they do not divide."""
    group = group or inputs
    if inputs % group or group % 2:
        reason = f"{name} has {inputs} inputs, which even groups of {group} do not divide"
        hint = "choose another quantization.group, or other quantization.targets"
        raise ConfigError(Problem("quantization.group", reason, value=group, hint=hint))
    return inputs // group
