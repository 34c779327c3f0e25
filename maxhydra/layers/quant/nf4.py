"""Frozen weights in 4-bit NormalFloat with double quantization (QLoRA: Dettmers et al., 2023).

Every BLOCK inputs of an output share a scale, their amax; the scaled values are rounded to the nearest of sixteen
levels, quantiles of a normal distribution. The scales are stored as 8-bit floats after subtracting the mean of their
group, which holds the scales of all outputs over the same inputs. In total 4.13 bits per weight. Inputs are flattened
to one dimension, so blocks need not align with heads.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.layers.quant.int8 import Quantized, pack_nibbles, unpack_nibbles
from maxhydra.sharding import LogicalAxes

BLOCK = 64
# Appendix E of the paper.
LEVELS = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
SCALE = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(SCALE).max)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Nf4Parts:
    """The arrays of an NF4 kernel [inputs, *outputs]."""

    codes: jax.Array
    """uint8 [inputs / 2, *outputs]: levels of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """8-bit floats [inputs / BLOCK, *outputs]."""
    groups: jax.Array
    """float32 [inputs / BLOCK, 2]: mean of the scales, and the factor of their deviation from it."""

    def kernel(self, dtype: np.dtype) -> jax.Array:
        """Dequantize to [inputs, *outputs], multiplied in float32 and rounded once."""
        outputs = self.codes.shape[1:]
        levels = jnp.asarray(LEVELS, jnp.float32)[unpack_nibbles(self.codes, 0)].reshape(-1, BLOCK, *outputs)
        mean, spread = (self.groups[:, i].reshape(-1, *[1] * len(outputs)) for i in range(2))
        scales = mean + spread * self.scales.astype(jnp.float32)
        return (levels * scales[:, None]).astype(dtype).reshape(-1, *outputs)


def quantized(kernel: jax.Array) -> Nf4Parts:
    """Quantize a kernel [inputs, *outputs]."""
    outputs = kernel.shape[1:]
    blocks = kernel.astype(jnp.float32).reshape(-1, BLOCK, *outputs)
    absmax = jnp.max(jnp.abs(blocks), axis=1)
    over = tuple(range(1, absmax.ndim))
    mean = jnp.mean(absmax, axis=over, keepdims=True)
    spread = jnp.max(jnp.abs(absmax - mean), axis=over, keepdims=True) / LARGEST
    scales = ((absmax - mean) / jnp.where(spread > 0, spread, 1)).astype(SCALE)
    boundaries = (np.array(LEVELS[1:], np.float32) + np.array(LEVELS[:-1], np.float32)) / 2
    unit = blocks / jnp.where(absmax > 0, absmax, 1)[:, None]
    codes = jnp.searchsorted(jnp.asarray(boundaries), unit, method="compare_all").reshape(-1, *outputs)
    groups = jnp.stack([mean.reshape(-1), spread.reshape(-1)], axis=1)
    return Nf4Parts(codes=pack_nibbles(codes, 0), scales=scales, groups=groups)


class Nf4(nnx.Module):
    """An NF4 kernel [*inputs, *outputs], with a leading dimension of layers if its array had one."""

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, *, inputs: int, stacked: bool, name: str):
        """`axes`: those of the kernel; the axis of the first input is used for the flattened inputs."""
        lead = int(stacked)
        self.inputs = kernel.shape[lead : lead + inputs]
        if math.prod(self.inputs) % BLOCK:
            reason = (
                f"{name} has {math.prod(self.inputs)} inputs, which is not a multiple of the NF4 block size {BLOCK}"
            )
            raise ConfigError(Problem("adapter.kind", reason, value="qlora", hint="use adapter=lora instead"))
        parts = stored(kernel, inputs=inputs, stacked=stacked)
        outputs = axes[lead + inputs :]
        self.codes = Quantized(parts["codes"], axes=(*axes[: lead + 1], *outputs))
        # There are few blocks, so they need not be divisible by the number of devices.
        self.scales = Quantized(parts["scales"], axes=(*axes[:lead], None, *outputs))
        self.groups = Quantized(parts["groups"], axes=(*axes[:lead], None, None))

    @property
    def parts(self) -> Nf4Parts:
        return Nf4Parts(self.codes[...], self.scales[...], self.groups[...])

    def unpacked(self, parts: Nf4Parts, dtype: np.dtype) -> jax.Array:
        """Dequantize to [*inputs, *outputs] of one layer."""
        flat = parts.kernel(dtype)
        return flat.reshape(*self.inputs, *flat.shape[1:])


def stored(kernel: jax.Array, *, inputs: int, stacked: bool) -> dict[str, jax.Array]:
    """The arrays of an Nf4 module by name."""
    lead = int(stacked)
    flat = kernel.reshape(*kernel.shape[:lead], -1, *kernel.shape[lead + inputs :])
    # One layer at a time: temporaries take several times the size of a layer.
    return vars(jax.lax.map(quantized, flat) if stacked else quantized(flat))


def dequantized(parts: dict[str, jax.Array], shape: tuple[int, ...], *, stacked: bool, dtype: np.dtype) -> jax.Array:
    """The dequantized kernel of the arrays of an Nf4 module, in its shape."""

    def dequantize(parts: Nf4Parts) -> jax.Array:
        return parts.kernel(dtype)

    return (jax.vmap(dequantize) if stacked else dequantize)(Nf4Parts(**parts)).reshape(shape)
