"""Weights in eight bits for decoding: integers, and one scale for all numbers that are summed into the same output.

The scale is the largest magnitude over 127, so that codes are symmetric and zero stays zero.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.kernels.int8_matmul import rounded
from maxhydra.layers.quant.pack_bits import Quantized
from maxhydra.sharding import LogicalAxes

LARGEST = 127


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Int8Parts:
    """A weight in eight bits."""

    codes: jax.Array
    """int8, as the weight is laid out."""
    scales: jax.Array
    """float32, without the dimensions that are summed over."""


def quantized(weight: jax.Array, over: Sequence[int]) -> Int8Parts:
    """A weight in eight bits, a scale for what differs in these dimensions only."""
    codes, scales = rounded(weight, over, largest=LARGEST)
    return Int8Parts(codes, jnp.squeeze(scales, tuple(over)))


def rounded_weight(weight: jax.Array, over: Sequence[int]) -> jax.Array:
    """A weight as it is after that, in its own number format."""
    return rounded(weight, over, largest=LARGEST).wide(weight.dtype)


def stored(weight: jax.Array, axes: LogicalAxes, of_scales: LogicalAxes) -> dict[str, jax.Array]:
    """The arrays of an Int8 by name, given its axes: what the scales lack is summed over."""
    return vars(quantized(weight, [place for place, name in enumerate(axes) if name not in of_scales]))


class Int8(nnx.Module):
    """A weight in eight bits; stacked over layers or not, as its array was."""

    def __init__(self, weight: jax.Array, axes: LogicalAxes, *, summed: LogicalAxes, leading: int = 0):
        """`summed`: axes that a product with the weight sums over; `leading`: dimensions of a layer's weight before
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
        """The weight, scales standing for what is summed behind the dimensions that lead."""
        codes, scales = self.parts.codes, self.parts.scales
        over = tuple(range(self.leading, self.leading + codes.ndim - scales.ndim))
        return (codes.astype(jnp.float32) * jnp.expand_dims(scales, over)).astype(dtype)


def side_by_side(parts: Sequence[Int8Parts]) -> Int8Parts:
    """Kernels [*inputs, *outputs] of the same inputs as one, joined in the first dimension of their outputs."""
    if len(parts) == 1:
        return parts[0]
    inputs = parts[0].codes.ndim - parts[0].scales.ndim
    codes = jnp.concatenate([part.codes for part in parts], axis=inputs)
    return Int8Parts(codes, jnp.concatenate([part.scales for part in parts]))


def rows(table: Int8Parts, at: jax.Array, dtype: np.dtype) -> jax.Array:
    """Rows of a table with a scale for each; NaN outside of it."""
    codes = jnp.take(table.codes, at, axis=0, mode="clip").astype(jnp.float32)
    scales = jnp.take(table.scales, at, axis=0, mode="fill", fill_value=jnp.nan)
    return (codes * scales[..., None]).astype(dtype)
