"""INT8 weights for decoding: integers, and one scale per output channel.

The scale is amax / 127, so codes are symmetric and zero stays zero.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.kernels.int8_matmul import quantize
from maxhydra.sharding import LogicalAxes


class Quantized(nnx.Variable):
    """An array of a quantized weight: never cast, never trained."""


def pack_nibbles(codes: jax.Array, axis: int) -> jax.Array:
    """Pack 4-bit codes into bytes: two neighbors along an axis per byte, the first in the low half."""
    pairs = codes.astype(jnp.uint8).reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    first, second = (jax.lax.index_in_dim(pairs, half, axis + 1, keepdims=False) for half in (0, 1))
    return (first & 15) | second << 4


def unpack_nibbles(pairs: jax.Array, axis: int) -> jax.Array:
    """The 4-bit codes, 0 to 15, of packed bytes."""
    both = jnp.stack([pairs & 15, pairs >> 4], axis=axis + 1)
    return both.reshape(*pairs.shape[:axis], -1, *pairs.shape[axis + 1 :])


LARGEST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Parts:
    """The arrays of an INT8 weight."""

    codes: jax.Array
    """int8, in the layout of the weight."""
    scales: jax.Array
    """float32, without the contracted dimensions."""


def quantized(weight: jax.Array, over: Sequence[int]) -> Int8Parts:
    """Quantize a weight with one scale over the dimensions `over`."""
    codes, scales = quantize(weight, over, largest=LARGEST)
    return Int8Parts(codes, jnp.squeeze(scales, tuple(over)))


def rounded_weight(weight: jax.Array, over: Sequence[int]) -> jax.Array:
    """The weight after quantization and dequantization, in its own dtype."""
    return quantize(weight, over, largest=LARGEST).wide(weight.dtype)


def stored(weight: jax.Array, axes: LogicalAxes, of_scales: LogicalAxes) -> dict[str, jax.Array]:
    """The arrays of an Int8 module by name; axes that the scales lack are reduced."""
    return vars(quantized(weight, [dim for dim, name in enumerate(axes) if name not in of_scales]))


class Int8(nnx.Module):
    """An INT8 weight, with a leading dimension of layers if its array had one."""

    def __init__(self, weight: jax.Array, axes: LogicalAxes, *, summed: LogicalAxes, leading: int = 0):
        """`summed`: axes contracted in a matmul with the weight; `leading`: dimensions of a layer's weight before
        them."""
        self.leading = leading
        of_scales = tuple(name for name in axes if name not in summed)
        parts = stored(weight, axes, of_scales)
        self.codes = Quantized(parts["codes"], axes=axes)
        self.scales = Quantized(parts["scales"], axes=of_scales)

    @property
    def parts(self) -> Int8Parts:
        return Int8Parts(self.codes[...], self.scales[...])

    def unpacked(self, dtype: np.dtype) -> jax.Array:
        """Dequantize; scales are broadcast over the contracted dimensions after the leading ones."""
        codes, scales = self.parts.codes, self.parts.scales
        over = tuple(range(self.leading, self.leading + codes.ndim - scales.ndim))
        return (codes.astype(jnp.float32) * jnp.expand_dims(scales, over)).astype(dtype)


def concatenate_int8(parts: Sequence[Int8Parts]) -> Int8Parts:
    """Kernels [*inputs, *outputs] of the same inputs, concatenated along their first output dimension."""
    if len(parts) == 1:
        return parts[0]
    inputs = parts[0].codes.ndim - parts[0].scales.ndim
    codes = jnp.concatenate([part.codes for part in parts], axis=inputs)
    return Int8Parts(codes, jnp.concatenate([part.scales for part in parts]))


def take_rows(table: Int8Parts, index: jax.Array, dtype: np.dtype) -> jax.Array:
    """Dequantized rows of an embedding table; NaN for an index out of range."""
    codes = jnp.take(table.codes, index, axis=0, mode="clip").astype(jnp.float32)
    scales = jnp.take(table.scales, index, axis=0, mode="fill", fill_value=jnp.nan)
    return (codes * scales[..., None]).astype(dtype)
