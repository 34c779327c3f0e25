"""Convolutions from features to a waveform: causal ones, transposed ones, and Snake activations.

Kernels have the layout of the files, [outputs, inputs, taps], transposed ones [inputs, outputs, taps]. B batch, T
positions, C channels.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema.speech import DILATIONS
from maxhydra.layers.norm import LayerNorm
from maxhydra.layers.params import Dtypes, ParamBuilder

# Taps of the convolutions.
TAPS = 7
# Hidden channels of a ConvNeXt block per channel, the epsilon of its norm, and the initial scale of its output.
EXPANSION, CONVNEXT_EPS, CONVNEXT_SCALE = 4, 1e-6, 1e-6
# Keeps the division of Snake finite.
SNAKE_EPS = 1e-9
LAYOUT = ("NWC", "OIW", "NWC")


@dataclasses.dataclass(frozen=True)
class ConvSpec:
    """One convolution."""

    inputs: int
    outputs: int
    taps: int
    dilation: int = 1
    is_depthwise: bool = False


class CausalConv(nnx.Module):
    """A convolution whose outputs depend on no later position."""

    def __init__(self, spec: ConvSpec, make: ParamBuilder):
        self.spec = spec
        inputs = 1 if spec.is_depthwise else spec.inputs
        std = (inputs * spec.taps) ** -0.5
        self.kernel = make.matrix((spec.outputs, inputs), (spec.taps,), (None, None, None), std=std)
        self.bias = make.zeros((spec.outputs,), ("norm",))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        spec = self.spec
        out_BTC = jax.lax.conv_general_dilated(
            x_BTC,
            self.kernel[...].astype(x_BTC.dtype),
            window_strides=(1,),
            padding=[((spec.taps - 1) * spec.dilation, 0)],
            rhs_dilation=(spec.dilation,),
            dimension_numbers=LAYOUT,
            feature_group_count=spec.inputs if spec.is_depthwise else 1,
        )
        return out_BTC + self.bias[...].astype(x_BTC.dtype)


class TransposedConv(nnx.Module):
    """A transposed convolution that upsamples by a factor; `taps - factor` positions are cut off on both sides."""

    def __init__(self, inputs: int, outputs: int, *, taps: int, factor: int, make: ParamBuilder):
        self.taps, self.factor = taps, factor
        self.kernel = make.matrix((inputs, outputs), (taps,), (None, None, None), std=(inputs * taps) ** -0.5)
        self.bias = make.zeros((outputs,), ("norm",))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        kernel_OIW = jnp.flip(self.kernel[...].astype(x_BTC.dtype), axis=-1).swapaxes(0, 1)
        edge = self.factor - 1
        out_BTC = jax.lax.conv_general_dilated(
            x_BTC, kernel_OIW, (1,), [(edge, edge)], lhs_dilation=(self.factor,), dimension_numbers=LAYOUT
        )
        return out_BTC + self.bias[...].astype(x_BTC.dtype)


class Snake(nnx.Module):
    """x + sin(x * frequency)^2 / amplitude, per channel, with logarithms as parameters (Ziyin et al., 2020)."""

    def __init__(self, channels: int, make: ParamBuilder):
        self.log_frequency = make.zeros((channels,), ("norm",))
        self.log_amplitude = make.zeros((channels,), ("norm",))

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x = x_BTC.astype(jnp.float32)
        frequency, amplitude = (
            jnp.exp(value[...].astype(jnp.float32)) for value in (self.log_frequency, self.log_amplitude)
        )
        return (x + jnp.sin(x * frequency) ** 2 / (amplitude + SNAKE_EPS)).astype(x_BTC.dtype)


class ConvNext(nnx.Module):
    """x + scale * down(gelu(up(norm(depthwise(x))))) (Liu et al., 2022)."""

    def __init__(self, channels: int, dtypes: Dtypes, make: ParamBuilder):
        hidden = EXPANSION * channels
        self.depthwise = CausalConv(ConvSpec(channels, channels, TAPS, is_depthwise=True), make)
        self.norm = LayerNorm(channels, eps=CONVNEXT_EPS, dtypes=dtypes, make=make)
        self.up = CausalConv(ConvSpec(channels, hidden, 1), make)
        self.down = CausalConv(ConvSpec(hidden, channels, 1), make)
        self.scale = make.full((channels,), ("norm",), CONVNEXT_SCALE)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        hidden = jax.nn.gelu(self.up(self.norm(self.depthwise(x_BTC))), approximate=False)
        return x_BTC + self.scale[...].astype(x_BTC.dtype) * self.down(hidden)


class ResidualUnit(nnx.Module):
    """x + out(snake(dilated(snake(x))))."""

    def __init__(self, channels: int, dilation: int, make: ParamBuilder):
        self.snake, self.out_snake = Snake(channels, make), Snake(channels, make)
        self.dilated = CausalConv(ConvSpec(channels, channels, TAPS, dilation), make)
        self.out = CausalConv(ConvSpec(channels, channels, 1), make)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        return x_BTC + self.out(self.out_snake(self.dilated(self.snake(x_BTC))))


class UpsampleUnit(nnx.Module):
    """A transposed convolution, then a ConvNeXt block."""

    def __init__(self, channels: int, factor: int, dtypes: Dtypes, make: ParamBuilder):
        self.expand = TransposedConv(channels, channels, taps=factor, factor=factor, make=make)
        self.block = ConvNext(channels, dtypes, make)

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        return self.block(self.expand(x_BTC))


class WaveStage(nnx.Module):
    """Snake, a transposed convolution to half of the channels, and residual units of growing dilation."""

    def __init__(self, channels: int, factor: int, make: ParamBuilder):
        self.snake = Snake(channels, make)
        self.expand = TransposedConv(channels, channels // 2, taps=2 * factor, factor=factor, make=make)
        units = (ResidualUnit(channels // 2, dilation, make) for dilation in DILATIONS)
        self.units = nnx.Dict({str(index): unit for index, unit in enumerate(units)})

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        x_BTC = self.expand(self.snake(x_BTC))
        for index in range(len(DILATIONS)):
            x_BTC = self.units[str(index)](x_BTC)
        return x_BTC


class WaveDecoder(nnx.Module):
    """A convolution, stages that upsample, Snake, and a convolution to one channel; numbered in this order."""

    def __init__(self, inputs: int, channels: int, rates: list[int], make: ParamBuilder):
        modules: list[nnx.Module] = [CausalConv(ConvSpec(inputs, channels, TAPS), make)]
        for index, rate in enumerate(rates):
            modules.append(WaveStage(channels // 2**index, rate, make))
        last = channels // 2 ** len(rates)
        modules += [Snake(last, make), CausalConv(ConvSpec(last, 1, TAPS), make)]
        self.modules = nnx.Dict({str(index): module for index, module in enumerate(modules)})

    def __call__(self, x_BTC: jax.Array) -> jax.Array:
        """[B, samples] values from -1 to 1, in float32."""
        for index in range(len(self.modules)):
            x_BTC = self.modules[str(index)](x_BTC)
        return jnp.clip(x_BTC[..., 0].astype(jnp.float32), -1, 1)


def samples_per_frame(factors: list[int]) -> int:
    """Samples that upsampling by all factors makes of a frame."""
    return int(np.prod(factors))
