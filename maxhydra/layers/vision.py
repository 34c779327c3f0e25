"""Image encoder and projector: pixels to embeddings of image tokens.

The encoder is a vision transformer with learned positions (Dosovitskiy et al., 2021; SigLIP, Zhai et al., 2023). Its
layers are stacked and scanned like those of the decoder. I images, P patches of an image, S of them along a side, N
tokens of an image, B batch, T tokens, D residual stream, E width of the encoder, A attention heads of size H.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.attention import Request
from maxhydra.layers.attention import attend
from maxhydra.layers.context import Context, KernelChoice
from maxhydra.layers.embedding import replace_placeholders
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.norm import LayerNorm, RMSNorm
from maxhydra.layers.params import Dtypes, ParamBuilder

CHANNELS = 3
Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]


@dataclasses.dataclass(frozen=True)
class VisionSpec:
    """Sizes and options of encoder and projector, resolved from the config."""

    num_layers: int
    patch_size: int
    patch_rows: int
    emb_dim: int
    num_heads: int
    mlp: MlpSpec
    norm_eps: float
    pooling: config.Pooling
    token_rows: int
    is_bidirectional: bool
    placeholder_id: int
    out_dim: int
    init_scale: float
    is_centered: bool
    """Whether the scale of the projector's norm is stored minus one."""
    kernel: KernelChoice
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "VisionSpec | None":
        """None for models that take no images."""
        section = model.vision
        if section.num_layers is None:
            return None
        assert section.placeholder_id is not None
        mlp = MlpSpec(
            emb_dim=section.emb_dim,
            dim=section.mlp_dim,
            is_gated=False,
            activation=section.activation,
            has_bias=True,
            init_scale=model.init_scale,
            out_scale=model.init_scale * (2 * section.num_layers) ** -0.5,
            dtypes=Dtypes.of(model.dtypes),
        )
        return cls(
            num_layers=section.num_layers,
            patch_size=section.patch_size,
            patch_rows=section.patch_rows,
            emb_dim=section.emb_dim,
            num_heads=section.num_heads,
            mlp=mlp,
            norm_eps=section.norm_eps,
            pooling=section.projector.pooling,
            token_rows=section.token_rows,
            is_bidirectional=section.bidirectional,
            placeholder_id=section.placeholder_id,
            out_dim=model.emb_dim,
            init_scale=model.init_scale,
            is_centered=model.norm is config.Norm.rms_plus_one,
            kernel=KernelChoice(model.kernels.attention.value, model.kernels.sizes("attention")),
            dtypes=Dtypes.of(model.dtypes),
        )

    @property
    def pooled_dim(self) -> int:
        """Size of the vector of a block of patches."""
        block = self.patch_rows // self.token_rows
        return self.emb_dim * (block**2 if self.pooling is config.Pooling.concatenate else 1)


class EncoderLayer(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), over all patches of an image."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
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

    def __call__(self, x_IPE: jax.Array, ctx: Context) -> jax.Array:
        normed_IPE = self.attention_norm(x_IPE)
        heads = [projection(normed_IPE, ctx) for projection in (self.query, self.key, self.value)]
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
        attended_IPAH = attend(q_IPAH, k_IPAH, v_IPAH, request, ctx, kernel=self.spec.kernel)
        x_IPE = x_IPE + self.out(attended_IPAH, ctx)
        return x_IPE + self.mlp(self.mlp_norm(x_IPE), ctx).out_BTD


class Projector(nnx.Module):
    """out(norm(pool(x))): one vector of the residual stream for every square block of patches."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
        self.spec = spec
        E = spec.pooled_dim
        self.norm = RMSNorm(E, eps=spec.norm_eps, dtypes=spec.dtypes, make=make, is_centered=spec.is_centered)
        self.out = make.projection("out", (E,), (spec.out_dim,), (None, "embed"), scale=spec.init_scale)

    def __call__(self, x_IPE: jax.Array, ctx: Context) -> jax.Array:
        I, _, E = x_IPE.shape
        S = self.spec.token_rows
        size = self.spec.patch_rows // S
        blocks = x_IPE.reshape(I, S, size, S, size, E)
        if self.spec.pooling is config.Pooling.average:
            pooled = jnp.mean(blocks, axis=(2, 4))
        else:
            pooled = blocks.swapaxes(2, 3)
        return self.out(self.norm(pooled.reshape(I, S * S, self.spec.pooled_dim)), ctx)


class VisionTower(nnx.Module):
    """projector(norm(layers(patches(pixels) + positions)))."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
        self.spec = spec
        E, size = spec.emb_dim, spec.patch_size
        inputs, axes = (CHANNELS, size, size), (None, None, None, "embed")
        self.patches = make.projection("patches", inputs, (E,), axes, scale=spec.init_scale, has_bias=True)
        self.positions = make.matrix((spec.patch_rows**2,), (E,), ("positions", "embed"), std=E**-0.5)
        self.layers = EncoderLayer(spec, make.stacked(spec.num_layers).below("vision"))
        self.norm = LayerNorm(E, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.projector = Projector(spec, make.below("projector"))

    def embed(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context, wrap: Wrap) -> tuple[jax.Array, Context]:
        """Token embeddings with those of placeholders replaced, in order, by the tokens of the row's images.

        Also returns the context of the decoder's layers. `wrap`: rematerialization of a layer.
        """
        assert ctx.images is not None
        B, count, *pixels = ctx.images.shape
        features_IND = self(ctx.images.reshape(B * count, *pixels), ctx.for_encoder(B * count), wrap)
        features_BND = features_IND.reshape(B, -1, features_IND.shape[-1])
        is_image_BT = tokens_BT == self.spec.placeholder_id
        x_BTD = replace_placeholders(x_BTD, features_BND, is_image_BT)
        groups_BT = _image_groups(is_image_BT) if self.spec.is_bidirectional else None
        return x_BTD, dataclasses.replace(ctx, images=None, image_groups_BT=groups_BT)

    @jax.named_scope("vision")
    def __call__(self, pixels: jax.Array, ctx: Context, wrap: Wrap) -> jax.Array:
        """[I, N, D] tokens of images [I, height, width, channels]."""
        spec = self.spec
        I, S, size = len(pixels), spec.patch_rows, spec.patch_size
        patches = pixels.astype(spec.dtypes.compute).reshape(I, S, size, S, size, CHANNELS).transpose(0, 1, 3, 5, 2, 4)
        x_IPE = self.patches(patches.reshape(I, S * S, CHANNELS, size, size), ctx)
        x_IPE = x_IPE + self.positions[...].astype(x_IPE.dtype)
        graphdef, weights = nnx.split(self.layers)

        def run(weights: nnx.State, x_IPE: jax.Array, ctx: Context) -> jax.Array:
            return nnx.merge(graphdef, weights)(x_IPE, ctx)

        wrapped = wrap(run)
        x_IPE = jax.lax.scan(lambda x_IPE, layer: (wrapped(layer, x_IPE, ctx), None), x_IPE, weights)[0]
        return self.projector(self.norm(x_IPE), ctx)


def _image_groups(is_image_BT: jax.Array) -> jax.Array:
    """[B, T] number of the run of placeholders that a token is part of; 0 for other tokens."""
    before_BT = jnp.pad(is_image_BT, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(is_image_BT, jnp.cumsum(is_image_BT & ~before_BT, axis=1), 0)
