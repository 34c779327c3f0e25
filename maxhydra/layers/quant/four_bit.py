"""Base classes of the 4-bit weight formats, INT4 (int4.py) and MXFP4 (mxfp4.py).

Inputs are flattened to one dimension, so groups need not align with heads.
"""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.kernels.grouped_matmul.expert_weights import Matrices, can_pack
from maxhydra.layers.quant.int8 import Quantized, unpack_nibbles
from maxhydra.sharding import LogicalAxes


@dataclasses.dataclass(frozen=True)
class FourBitParts(abc.ABC):
    """The arrays of a kernel [*leading, inputs, *outputs]."""

    nibbles: jax.Array
    """uint8 [*leading, inputs / 2, *outputs]: codes of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """[*leading, groups, *outputs], in the format's dtype."""

    @staticmethod
    @abc.abstractmethod
    def code_values(codes: jax.Array) -> jax.Array:
        """The values of codes in float32."""

    @staticmethod
    @abc.abstractmethod
    def scale_values(scales: jax.Array) -> jax.Array:
        """The values of scales in float32."""

    def kernel(self, dtype: np.dtype, *, leading: int) -> jax.Array:
        """Dequantize to [*leading, inputs, *outputs], multiplied in float32 and rounded once.

        Inputs are moved last in between: GPU decoding stores them last, so nothing is transposed there.
        """
        nibbles, scales = (jnp.moveaxis(part, leading, -1) for part in (self.nibbles, self.scales))
        codes = unpack_nibbles(nibbles, nibbles.ndim - 1)
        grouped = self.code_values(codes).reshape(*scales.shape, -1) * self.scale_values(scales)[..., None]
        return jnp.moveaxis(grouped.astype(dtype).reshape(codes.shape), -1, leading)


class Shape(NamedTuple):
    """Number of dimensions of each role in a kernel, in this order; the rest are outputs."""

    stacked: int
    experts: int
    inputs: int

    @property
    def leading(self) -> int:
        return self.stacked + self.experts

    def input_sizes(self, kernel: jax.Array) -> tuple[int, ...]:
        return kernel.shape[self.leading : self.leading + self.inputs]


class FourBit(nnx.Module):
    """A kernel [*inputs, *outputs], with leading dimensions of layers and experts if its array had them."""

    parts_type: type[FourBitParts]

    def __init__(self, parts: FourBitParts, inputs: tuple[int, ...], axes: LogicalAxes, shape: Shape):
        """`axes`: those of the kernel; the axis of the first input is used for the flattened inputs."""
        self.inputs, self.leading = inputs, shape.experts
        flat_axes = (*axes[: shape.leading + 1], *axes[shape.leading + shape.inputs :])
        self.nibbles = Quantized(parts.nibbles, axes=flat_axes)
        self.scales = Quantized(parts.scales, axes=flat_axes)

    @property
    def parts(self) -> FourBitParts:
        return self.parts_type(self.nibbles[...], self.scales[...])

    @property
    def packed(self) -> Matrices | None:
        """The experts' kernels if the decode layout has packed them (decode/weight_layout.py)."""
        matrices = Matrices(self.nibbles[...], self.scales[...])
        return matrices if matrices.is_packed else None

    def unpacked(self, parts: FourBitParts, dtype: np.dtype) -> jax.Array:
        """Dequantize to [*inputs, *outputs] of one layer, or of each of its experts."""
        flat = parts.kernel(dtype, leading=self.leading)
        return flat.reshape(*flat.shape[: self.leading], *self.inputs, *flat.shape[self.leading + 1 :])


def packed(arrays: dict[str, jax.Array], pack: Callable[..., Matrices]) -> dict[str, Any]:
    """The arrays of a module of experts, packed for the kernels of a few rows if they take such groups.

    `pack`: makes matrices of the format from codes and scales.
    """
    nibbles, scales = arrays["nibbles"], arrays["scales"]
    if not can_pack(2 * nibbles.shape[1], scales.shape[1]):
        return arrays
    matrices = pack(unpack_nibbles(nibbles, 1), scales)
    return {"nibbles": matrices.values, "scales": matrices.scales}
