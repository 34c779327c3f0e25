"""Transformer layers of encoders of other media: images and audio.

I images or windows of audio, P patches or tokens of one, E width of the encoder, A attention heads of size H.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.audio import AudioEncoder
from maxhydra.config.schema.vision import EncoderLayers, EncoderNorm
from maxhydra.kernels.attention import Request
from maxhydra.layers.attention import attend
from maxhydra.layers.clipped_linear import build_mlp, build_projection
from maxhydra.layers.context import Context, KernelChoice
from maxhydra.layers.mlp import MlpSpec
from maxhydra.layers.norm import LayerNorm, PlainNorm, RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.rope import rotate_2d

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderSpec:
    """Sizes and options that encoders have in common, resolved from the config."""

    num_layers: int
    emb_dim: int
    num_heads: int
    mlp: MlpSpec
    norm: EncoderNorm
    norm_eps: float
    is_sandwich: bool
    """Whether norms also follow attention and feed-forward."""
    has_qkv_norm: bool
    has_bias: bool
    is_clipped: bool
    rope_theta: float | None = None
    """Base of the frequencies of two-dimensional RoPE; None: no RoPE."""
    placeholder_id: int
    out_dim: int
    init_scale: float
    kernel: KernelChoice
    dtypes: Dtypes


def encoder_values(section: config.Vision | config.Audio, model: config.Model) -> dict[str, Any]:
    """The fields of an EncoderSpec other than RoPE."""
    assert section.num_layers is not None and section.placeholder_id is not None
    dtypes = Dtypes.of(model.dtypes)
    layers = section.layers if isinstance(section, config.Vision) else _audio_layers(section)
    mlp = MlpSpec(
        emb_dim=section.emb_dim,
        dim=section.mlp_dim,
        is_gated=layers.gated,
        activation=section.activation,
        has_bias=layers.bias,
        init_scale=model.init_scale,
        out_scale=model.init_scale * (2 * section.num_layers) ** -0.5,
        dtypes=dtypes,
    )
    return {
        "num_layers": section.num_layers,
        "emb_dim": section.emb_dim,
        "num_heads": section.num_heads,
        "mlp": mlp,
        "norm": layers.norm,
        "norm_eps": section.norm_eps,
        "is_sandwich": layers.sandwich,
        "has_qkv_norm": layers.qkv_norm,
        "has_bias": layers.bias,
        "is_clipped": layers.clipped,
        "placeholder_id": section.placeholder_id,
        "out_dim": model.emb_dim,
        "init_scale": model.init_scale,
        "kernel": KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
        "dtypes": dtypes,
    }


def _audio_layers(audio: config.Audio) -> EncoderLayers:
    """Options of the layers of an audio encoder: those of Whisper, or of a conformer."""
    if audio.encoder is AudioEncoder.transformer:
        return EncoderLayers()
    return EncoderLayers(norm=EncoderNorm.rms, bias=False, clipped=audio.conformer.clipped)


def build_norm(spec: EncoderSpec, make: ParamBuilder) -> LayerNorm | RMSNorm:
    """A norm over the width of the encoder."""
    kind = LayerNorm if spec.norm is EncoderNorm.layer else RMSNorm
    return kind(spec.emb_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)


class EncoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over the patches or tokens of one segment.

    In a sandwich the outputs of both branches are normalized too.
    """

    def __init__(self, spec: EncoderSpec, make: ParamBuilder):
        self.spec = spec
        E, A = spec.emb_dim, spec.num_heads
        H, attention = E // A, make.below("attention")
        inner = partial(build_projection, attention, has_bias=spec.has_bias, is_clipped=spec.is_clipped)
        axes = ("embed", "heads", "head_dim")
        norm = partial(build_norm, spec, make)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_out_norm = norm() if spec.is_sandwich else None
        self.mlp_out_norm = norm() if spec.is_sandwich else None
        head_norm = partial(RMSNorm, H, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.query_norm = head_norm() if spec.has_qkv_norm else None
        self.key_norm = head_norm() if spec.has_qkv_norm else None
        self.value_norm = PlainNorm(eps=spec.norm_eps, dtypes=spec.dtypes) if spec.has_qkv_norm else None
        self.query = inner("query", (E,), (A, H), axes, scale=spec.init_scale)
        self.key = inner("key", (E,), (A, H), axes, scale=spec.init_scale)
        self.value = inner("value", (E,), (A, H), axes, scale=spec.init_scale)
        self.out = inner("out", (A, H), (E,), ("heads", "head_dim", "embed"), scale=spec.mlp.out_scale)
        self.mlp = build_mlp(spec.mlp, make.below("mlp"), is_clipped=spec.is_clipped)

    def __call__(self, x_IPE: jax.Array, positions_IP2: jax.Array | None, ctx: Context) -> jax.Array:
        attended_IPE = self._attend(self.attention_norm(x_IPE), positions_IP2, ctx)
        x_IPE = x_IPE + (attended_IPE if self.attention_out_norm is None else self.attention_out_norm(attended_IPE))
        out_IPE = self.mlp(self.mlp_norm(x_IPE), ctx).out_BTD
        return x_IPE + (out_IPE if self.mlp_out_norm is None else self.mlp_out_norm(out_IPE))

    def _attend(self, normed_IPE: jax.Array, positions_IP2: jax.Array | None, ctx: Context) -> jax.Array:
        heads = [projection(normed_IPE, ctx) for projection in (self.query, self.key, self.value)]
        norms = (self.query_norm, self.key_norm, self.value_norm)
        heads = [each if norm is None else norm(each) for each, norm in zip(heads, norms, strict=True)]
        if self.spec.rope_theta is not None and positions_IP2 is not None:
            heads[:2] = (rotate_2d(each, positions_IP2, self.spec.rope_theta) for each in heads[:2])
        heads = [ctx.constrain(each, "act_batch", None, "act_heads", None) for each in heads]
        request = Request(
            scale=1.0 if self.spec.has_qkv_norm else heads[0].shape[-1] ** -0.5,
            causal=False,
            window=None,
            chunk=None,
            softcap=None,
            softmax_dtype=self.spec.dtypes.softmax.name,
        )
        q_IPAH, k_IPAH, v_IPAH = heads
        tokens: dict[str, Any] = {"q_segments_BT": ctx.segments, "kv_segments_BS": ctx.segments}
        attended_IPAH = attend(q_IPAH, k_IPAH, v_IPAH, request, ctx, kernel=self.spec.kernel, **tokens)
        return self.out(attended_IPAH, ctx)


def run_layers(
    stacked: Any,
    x_IPE: jax.Array,
    positions_IP2: jax.Array | None,
    ctx: Context,
    wrap: Wrap,
    *,
    layers: tuple[int, int] | None = None,
) -> jax.Array:
    """Run all stacked layers, or those from the first up to, but not including, the second of `layers`.

    `wrap`: rematerialization of a layer.
    """
    graphdef, weights = nnx.split(stacked)
    if layers is not None and layers != (0, stacked.spec.num_layers):
        weights = jax.tree.map(lambda weight: weight[slice(*layers)], weights)

    def run(weights: nnx.State, x_IPE: jax.Array, ctx: Context) -> jax.Array:
        return nnx.merge(graphdef, weights)(x_IPE, positions_IP2, ctx)

    wrapped = wrap(run)
    return jax.lax.scan(lambda x_IPE, layer: (wrapped(layer, x_IPE, ctx), None), x_IPE, weights)[0]
