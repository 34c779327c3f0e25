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
from maxhydra.kernels.attention import Request
from maxhydra.layers.attention import attend
from maxhydra.layers.context import Context, KernelChoice
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.norm import LayerNorm
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
    norm_eps: float
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
    mlp = MlpSpec(
        emb_dim=section.emb_dim,
        dim=section.mlp_dim,
        is_gated=False,
        activation=section.activation,
        has_bias=True,
        init_scale=model.init_scale,
        out_scale=model.init_scale * (2 * section.num_layers) ** -0.5,
        dtypes=dtypes,
    )
    return {
        "num_layers": section.num_layers,
        "emb_dim": section.emb_dim,
        "num_heads": section.num_heads,
        "mlp": mlp,
        "norm_eps": section.norm_eps,
        "placeholder_id": section.placeholder_id,
        "out_dim": model.emb_dim,
        "init_scale": model.init_scale,
        "kernel": KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
        "dtypes": dtypes,
    }


class EncoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over the patches or tokens of one segment."""

    def __init__(self, spec: EncoderSpec, make: ParamBuilder):
        self.spec = spec
        E, A = spec.emb_dim, spec.num_heads
        H, attention = E // A, make.below("attention")
        inner, axes = partial(attention.projection, has_bias=True), ("embed", "heads", "head_dim")
        norm = partial(LayerNorm, E, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.query = inner("query", (E,), (A, H), axes, scale=spec.init_scale)
        self.key = inner("key", (E,), (A, H), axes, scale=spec.init_scale)
        self.value = inner("value", (E,), (A, H), axes, scale=spec.init_scale)
        self.out = inner("out", (A, H), (E,), ("heads", "head_dim", "embed"), scale=spec.mlp.out_scale)
        self.mlp = Mlp(spec.mlp, make.below("mlp"))

    def __call__(self, x_IPE: jax.Array, positions_IP2: jax.Array | None, ctx: Context) -> jax.Array:
        normed_IPE = self.attention_norm(x_IPE)
        heads = [projection(normed_IPE, ctx) for projection in (self.query, self.key, self.value)]
        if self.spec.rope_theta is not None and positions_IP2 is not None:
            heads[:2] = (rotate_2d(each, positions_IP2, self.spec.rope_theta) for each in heads[:2])
        heads = [ctx.constrain(each, "act_batch", None, "act_heads", None) for each in heads]
        request = Request(
            scale=heads[0].shape[-1] ** -0.5,
            causal=False,
            window=None,
            chunk=None,
            softcap=None,
            softmax_dtype=self.spec.dtypes.softmax.name,
        )
        q_IPAH, k_IPAH, v_IPAH = heads
        tokens: dict[str, Any] = {"q_segments_BT": ctx.segments, "kv_segments_BS": ctx.segments}
        attended_IPAH = attend(q_IPAH, k_IPAH, v_IPAH, request, ctx, kernel=self.spec.kernel, **tokens)
        x_IPE = x_IPE + self.out(attended_IPAH, ctx)
        return x_IPE + self.mlp(self.mlp_norm(x_IPE), ctx).out_BTD


def run_layers(
    stacked: EncoderLayer,
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
