"""Weights that stay as they are, in four bits: 4-bit NormalFloat with double quantisation (Dettmers et al., 2023).

Every BLOCK inputs of an output share a scale, their largest magnitude, by which they are divided; what is left becomes
the nearest of sixteen levels, the quantiles of a normal distribution. The scales in turn become 8-bit floats, after the
mean of their group is taken away; a group is the scales of all outputs over the same inputs. Together 4.13 bits a
weight. Inputs are one dimension here, so that blocks need not end where a head does.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config import ConfigError, Problem
from maxhydra.layers.quant.pack_bits import Quantized, paired, parted
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
    """A kernel [inputs, *outputs] in four bits."""

    codes: jax.Array
    """uint8 [inputs / 2, *outputs]: levels of two neighbouring inputs, the first in the lower half."""
    scales: jax.Array
    """8-bit floats [inputs / BLOCK, *outputs]."""
    groups: jax.Array
    """float32 [inputs / BLOCK, 2]: mean of the scales, and what they were divided by without it."""

    def kernel(self, dtype: np.dtype) -> jax.Array:
        """[inputs, *outputs], multiplied in float32 and rounded once."""
        outputs = self.codes.shape[1:]
        levels = jnp.asarray(LEVELS, jnp.float32)[parted(self.codes, 0)].reshape(-1, BLOCK, *outputs)
        mean, spread = (self.groups[:, i].reshape(-1, *[1] * len(outputs)) for i in range(2))
        scales = mean + spread * self.scales.astype(jnp.float32)
        return (levels * scales[:, None]).astype(dtype).reshape(-1, *outputs)


def quantized(kernel: jax.Array) -> Nf4Parts:
    """A kernel [inputs, *outputs] in four bits."""
    outputs = kernel.shape[1:]
    blocks = kernel.astype(jnp.float32).reshape(-1, BLOCK, *outputs)
    absmax = jnp.max(jnp.abs(blocks), axis=1)
    over = tuple(range(1, absmax.ndim))
    mean = jnp.mean(absmax, axis=over, keepdims=True)
    spread = jnp.max(jnp.abs(absmax - mean), axis=over, keepdims=True) / LARGEST
    scales = ((absmax - mean) / jnp.where(spread > 0, spread, 1)).astype(SCALE)
    between = (np.array(LEVELS[1:], np.float32) + np.array(LEVELS[:-1], np.float32)) / 2
    unit = blocks / jnp.where(absmax > 0, absmax, 1)[:, None]
    codes = jnp.searchsorted(jnp.asarray(between), unit, method="compare_all").reshape(-1, *outputs)
    groups = jnp.stack([mean.reshape(-1), spread.reshape(-1)], axis=1)
    return Nf4Parts(codes=paired(codes, 0), scales=scales, groups=groups)


class Nf4(nnx.Module):
    """The kernel [*inputs, *outputs] of a projection, in four bits; stacked over layers or not, as its array was."""

    def __init__(self, kernel: jax.Array, axes: LogicalAxes, *, inputs: int, stacked: bool, name: str):
        """`axes` as those of the kernel, the first input's standing for all inputs."""
        lead = int(stacked)
        self.inputs = kernel.shape[lead : lead + inputs]
        if math.prod(self.inputs) % BLOCK:
            reason = f"{name} has {math.prod(self.inputs)} inputs, which blocks of {BLOCK} do not divide"
            raise ConfigError(Problem("adapter.kind", reason, value="qlora", hint="try adapter=lora"))
        parts = stored(kernel, inputs=inputs, stacked=stacked)
        outputs = axes[lead + inputs :]
        self.codes = Quantized(parts["codes"], axes=(*axes[: lead + 1], *outputs))
        # Blocks are few, and need not divide over devices.
        self.scales = Quantized(parts["scales"], axes=(*axes[:lead], None, *outputs))
        self.groups = Quantized(parts["groups"], axes=(*axes[:lead], None, None))

    @property
    def parts(self) -> Nf4Parts:
        return Nf4Parts(self.codes[...], self.scales[...], self.groups[...])

    def unpacked(self, parts: Nf4Parts, dtype: np.dtype) -> jax.Array:
        """[*inputs, *outputs] of one layer."""
        flat = parts.kernel(dtype)
        return flat.reshape(*self.inputs, *flat.shape[1:])


def stored(kernel: jax.Array, *, inputs: int, stacked: bool) -> dict[str, jax.Array]:
    """The arrays of an Nf4 by name."""
    lead = int(stacked)
    flat = kernel.reshape(*kernel.shape[:lead], -1, *kernel.shape[lead + inputs :])
    # Layer by layer, since the work on one takes several times its size.
    return vars(jax.lax.map(quantized, flat) if stacked else quantized(flat))


def restored(parts: dict[str, jax.Array], shape: tuple[int, ...], *, stacked: bool, dtype: np.dtype) -> jax.Array:
    """The kernel of such arrays, in its shape."""
    kernel = (lambda one: one.kernel(dtype)) if not stacked else jax.vmap(lambda one: one.kernel(dtype))
    return kernel(Nf4Parts(**parts)).reshape(shape)
