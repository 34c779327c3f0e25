"""A short causal convolution of each channel for itself, as recurrent mixers have before their heads (Fu et al., 2023).

B batch, T tokens, N heads, H head size, W taps, P = W - 1 tokens before the first.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.layers.weights import WeightMaker
from maxhydra.sharding import LogicalAxes


class ShortConvolution(nnx.Module):
    """silu(sum over w of kernel[w] * x[t - W + 1 + w]), within a sequence."""

    def __init__(self, shape: tuple[int, int], axes: LogicalAxes, *, taps: int, make: WeightMaker):
        self.kernel = make.matrix((taps,), shape, (None, *axes), std=taps**-0.5)

    def __call__(
        self, x_BTNH: jax.Array, segments_BT: jax.Array | None, tail_BPNH: jax.Array | None
    ) -> tuple[jax.Array, jax.Array | None]:
        """The sums, and, where a tail of earlier tokens goes in, that of the tokens so far.

        Without a tail a token sees its own segment alone. With one a row is one sequence, and padding stands before its
        first token, or after those of the call.
        """
        kernel_WNH = self.kernel[...].astype(x_BTNH.dtype)
        taps, length = kernel_WNH.shape[0], x_BTNH.shape[1]
        if segments_BT is not None:
            x_BTNH = jnp.where((segments_BT != 0)[:, :, None, None], x_BTNH, 0)
        before = jnp.zeros_like(x_BTNH, shape=(x_BTNH.shape[0], taps - 1, *x_BTNH.shape[2:]))
        all_BSNH = jnp.concatenate([before if tail_BPNH is None else tail_BPNH.astype(x_BTNH.dtype), x_BTNH], axis=1)
        total_BTNH = x_BTNH * kernel_WNH[-1]
        for back in range(1, taps):
            start = taps - 1 - back
            earlier_BTNH = all_BSNH[:, start : start + length]
            if segments_BT is not None and tail_BPNH is None:
                shifted_BT = jnp.pad(segments_BT, ((0, 0), (back, 0)))[:, :length]
                earlier_BTNH = jnp.where((shifted_BT == segments_BT)[:, :, None, None], earlier_BTNH, 0)
            total_BTNH = total_BTNH + earlier_BTNH * kernel_WNH[start]
        tail = None if tail_BPNH is None else _last(all_BSNH, segments_BT, taps - 1).astype(tail_BPNH.dtype)
        return jax.nn.silu(total_BTNH), tail


def _last(all_BSNH: jax.Array, segments_BT: jax.Array | None, count: int) -> jax.Array:
    """The tokens up to the last that is none of the padding after them."""
    if segments_BT is None:
        return all_BSNH[:, all_BSNH.shape[1] - count :]
    places_1T = jnp.arange(1, segments_BT.shape[1] + 1)[None]
    end_B = jnp.max(jnp.where(segments_BT != 0, places_1T, 0), axis=1)
    places_BP = end_B[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(all_BSNH, places_BP[:, :, None, None], axis=1)
