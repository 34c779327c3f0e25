"""Short causal convolutions: a part of recurrent mixers, and with two gates a separate mixer.

Shapes: B batch, T tokens, D residual stream, C channels, W convolution taps, P = W - 1 earlier tokens that a
convolution reads. Channels may have two dimensions, heads and their size.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.halo import with_previous_tokens
from maxhydra.kernels.placement import Placement
from maxhydra.layers.context import Context
from maxhydra.layers.interfaces import MixerOutput
from maxhydra.layers.kv_cache import Cache, CacheSpec, StateSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.sharding import LogicalAxes


def stored_states(ctx: Context) -> dict[str, Any]:
    """States of earlier tokens; zeros for rows that start in this call, whose slot may hold old data."""
    if ctx.cache is None:
        return {}
    is_first_BT = ctx.positions == 0
    if ctx.segments is not None:
        is_first_BT &= ctx.segments != 0
    starts_B = jnp.any(is_first_BT, axis=1)
    stored: dict[str, jax.Array] = ctx.cache.read(ctx.rows)
    return {name: jnp.where(starts_B.reshape(-1, *(1,) * (array.ndim - 1)), 0, array) for name, array in stored.items()}


class ShortConvolution(nnx.Module):
    """Causal depthwise convolution: sum over w of kernel[w] * x[t - W + 1 + w], within a sequence; then SiLU."""

    def __init__(
        self,
        shape: tuple[int, ...],
        axes: LogicalAxes,
        *,
        taps: int,
        make: ParamBuilder,
        has_bias: bool = False,
        is_activated: bool = True,
    ):
        self.kernel = make.matrix((taps,), shape, (None, *axes), std=taps**-0.5)
        self.bias = make.zeros(shape, axes) if has_bias else None
        self.is_activated = is_activated

    def __call__(
        self, x_BTC: jax.Array, segments_BT: jax.Array | None, tail_BPC: jax.Array | None, place: Placement
    ) -> tuple[jax.Array, jax.Array | None]:
        """The output, and the tail of the last P tokens if one was given.

        Without a tail a token sees only its own segment. With one every row is one sequence, and padding comes before
        its first token or after the last token of this call. `place`: the first dimension of the channels is split as
        `heads`.
        """
        convolved_BTC, tail_BPC = self._convolve(x_BTC, segments_BT, tail_BPC, place)
        if self.bias is not None:
            convolved_BTC = convolved_BTC + self.bias[...].astype(convolved_BTC.dtype)
        return jax.nn.silu(convolved_BTC) if self.is_activated else convolved_BTC, tail_BPC

    def _convolve(
        self, x_BTC: jax.Array, segments_BT: jax.Array | None, tail_BPC: jax.Array | None, place: Placement
    ) -> tuple[jax.Array, jax.Array | None]:
        kernel_WC = self.kernel[...].astype(x_BTC.dtype)
        before = kernel_WC.shape[0] - 1
        if segments_BT is not None:
            x_BTC = jnp.where(_over_channels(segments_BT != 0, x_BTC), x_BTC, 0)
        if tail_BPC is not None:
            all_BSC = jnp.concatenate([tail_BPC.astype(x_BTC.dtype), x_BTC], axis=1)
            return _sum_taps(kernel_WC, all_BSC, None), last_tokens(all_BSC, segments_BT, before).astype(tail_BPC.dtype)
        axis, size = place.spec("length")[0], place.num_shards("length")

        def on_device(kernel_WC: jax.Array, x_BTC: jax.Array, segments_BT: jax.Array | None) -> jax.Array:
            arrays = (x_BTC, segments_BT)
            if size > 1:
                extended = jax.tree.map(lambda x: with_previous_tokens(x, before, axis, size), arrays)
            else:
                extended = jax.tree.map(lambda x: jnp.pad(x, [(0, 0), (before, 0), *[(0, 0)] * (x.ndim - 2)]), arrays)
            return _sum_taps(kernel_WC, *extended)

        channels = place.spec("batch", "length", "heads")
        specs = (place.spec(None, "heads"), channels, place.spec("batch", "length"))
        run = place.shard_map(on_device, specs, channels) if size > 1 else on_device
        return run(kernel_WC, x_BTC, segments_BT), None


def _sum_taps(kernel_WC: jax.Array, x_BSC: jax.Array, segments_BS: jax.Array | None) -> jax.Array:
    """The convolution for the tokens behind the first W - 1, each within its segment."""
    taps, length = kernel_WC.shape[0], x_BSC.shape[1] - kernel_WC.shape[0] + 1
    total_BTC = x_BSC[:, taps - 1 :] * kernel_WC[-1]
    for start in reversed(range(taps - 1)):
        earlier_BTC = x_BSC[:, start : start + length]
        if segments_BS is not None:
            is_same_BT = segments_BS[:, start : start + length] == segments_BS[:, taps - 1 :]
            earlier_BTC = jnp.where(_over_channels(is_same_BT, earlier_BTC), earlier_BTC, 0)
        total_BTC = total_BTC + earlier_BTC * kernel_WC[start]
    return total_BTC


def last_tokens(all_BSC: jax.Array, segments_BT: jax.Array | None, count: int) -> jax.Array:
    """The last `count` tokens before the trailing padding."""
    if segments_BT is None:
        return all_BSC[:, all_BSC.shape[1] - count :]
    indices_1T = jnp.arange(1, segments_BT.shape[1] + 1)[None]
    end_B = jnp.max(jnp.where(segments_BT != 0, indices_1T, 0), axis=1)
    indices_BP = end_B[:, None] + jnp.arange(count)[None]
    return jnp.take_along_axis(all_BSC, _over_channels(indices_BP, all_BSC), axis=1)


def _over_channels(values_BT: jax.Array, x_BTC: jax.Array) -> jax.Array:
    """[B, T, 1, ...], which broadcasts over the channels of x."""
    return values_BT.reshape(*values_BT.shape, *(1,) * (x_BTC.ndim - 2))


@dataclasses.dataclass(frozen=True)
class ConvolutionSpec:
    """Sizes of the gated short convolution in one layer kind, resolved from the config."""

    emb_dim: int
    taps: int
    has_bias: bool
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "ConvolutionSpec":
        section = kind.convolution
        return cls(
            emb_dim=model.emb_dim,
            taps=section.taps,
            has_bias=section.bias,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def build(self, make: ParamBuilder) -> "GatedConvolution":
        return GatedConvolution(self, make)

    def forward_flops(self, seq_len: int) -> float:
        """Forward FLOPs per token, independent of length: four projections and the convolution."""
        return 2.0 * self.emb_dim * (4 * self.emb_dim + self.taps)


class GatedConvolution(nnx.Module):
    """out(output_gate(x) * convolution(input_gate(x) * value(x))), with as many channels as the residual stream."""

    def __init__(self, spec: ConvolutionSpec, make: ParamBuilder):
        self.spec = spec
        D = spec.emb_dim
        inner = partial(make.projection, scale=spec.init_scale, has_bias=spec.has_bias)
        self.input_gate = inner("input_gate", (D,), (D,), ("embed", "mlp"))
        self.output_gate = inner("output_gate", (D,), (D,), ("embed", "mlp"))
        self.value = inner("value", (D,), (D,), ("embed", "mlp"))
        self.filter = ShortConvolution(
            (D,), ("mlp",), taps=spec.taps, make=make, has_bias=spec.has_bias, is_activated=False
        )
        self.out = make.projection("out", (D,), (D,), ("mlp", "embed"), scale=spec.out_scale, has_bias=spec.has_bias)

    @jax.named_scope("convolution")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        gate_BTC, value_BTC, output_gate_BTC = (
            ctx.constrain(projection(x_BTD, ctx), "act_batch", "act_length", "act_mlp")
            for projection in (self.input_gate, self.value, self.output_gate)
        )
        gated_BTC = checkpoint_name(gate_BTC * value_BTC, "value")
        place = ctx.place.dividing(heads=self.spec.emb_dim)
        convolved_BTC, tail_BPC = self.filter(gated_BTC, ctx.segments, stored_states(ctx).get("tail"), place)
        out_BTD = self.out(checkpoint_name(output_gate_BTC * convolved_BTC, "context"), ctx)
        out_BTD = ctx.to_stream(out_BTD)
        cache = None if ctx.cache is None else ctx.cache.write({"tail": tail_BPC}, ctx.rows)
        return MixerOutput(checkpoint_name(out_BTD, "attention_out"), cache, {})

    def empty_cache(self, cache_spec: CacheSpec, layers: int) -> Cache:
        shape = (self.spec.taps - 1, self.spec.emb_dim)
        return cache_spec.states(layers, {"tail": StateSpec(shape, self.spec.dtypes.compute, (None, "act_mlp"))})
