"""Image encoder and projector: pixels to embeddings of image tokens.

The encoder is a vision transformer with learned positions (Dosovitskiy et al., 2021; SigLIP, Zhai et al., 2023), and
optionally a class token and two-dimensional RoPE. Its layers are stacked and scanned like those of the decoder. I
images, P patches of an image and its class token, S patches along a side, N tokens of an image, B batch, T tokens, D
residual stream, E width of the encoder.
"""

import dataclasses
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.embedding import replace_placeholders
from maxhydra.layers.encoder import EncoderLayer, EncoderSpec, Wrap, build_norm, encoder_values, run_layers
from maxhydra.layers.mlp import apply_activation
from maxhydra.layers.norm import Norm, PlainNorm, RMSNorm
from maxhydra.layers.params import ParamBuilder

CHANNELS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class VisionSpec(EncoderSpec):
    """Sizes and options of encoder and projector, resolved from the config."""

    patch_size: int
    patch_rows: int
    has_patch_bias: bool
    has_class_token: bool
    has_pre_norm: bool
    has_final_norm: bool
    axis_positions: int | None
    """Learned positions of rows, and of columns; None: one for each patch of a square image."""
    pooling: config.Pooling
    pooled_factor: float
    """Factor on pooled patches."""
    is_standardized: bool
    has_projector_norm: bool
    has_norm_scale: bool
    hidden_dims: tuple[int, ...]
    """Sizes of the projector's hidden layers."""
    hidden_activation: config.Activation
    token_rows: int
    has_projector_bias: bool
    max_patches: int | None
    """Patches of an image; None: the images are squares."""
    frames: int
    deepstack: tuple[int, ...]
    """Layers whose outputs are projected for the first layers of the decoder."""
    video_id: int | None
    step_positions: int | None
    """Positions of RoPE's time axis from a step of a video to the next; None: a step has those of an image."""
    video_audio_id: int | None
    """Placeholder of the audio between the steps of a video; None: there is none."""
    has_axis_positions: bool
    """Whether RoPE of the decoder has positions of time, row and column."""
    is_bidirectional: bool
    is_causal_without_window: bool
    """Whether decoder layers without a window are causal also among the tokens of an image."""
    is_centered: bool
    """Whether the scale of the projector's norm is stored minus one."""

    @classmethod
    def of(cls, model: config.Model) -> "VisionSpec | None":
        """None for models that take no images."""
        section = model.vision
        if section.num_layers is None:
            return None
        return cls(
            **encoder_values(section, model),
            patch_size=section.patch_size,
            patch_rows=section.patch_rows,
            has_patch_bias=section.patch_bias,
            has_class_token=section.class_token,
            rope_theta=section.rope_theta,
            has_pre_norm=section.pre_norm,
            has_final_norm=section.final_norm,
            axis_positions=section.axis_positions,
            pooling=section.projector.pooling,
            pooled_factor=section.emb_dim**0.5 if section.projector.scaled else 1.0,
            is_standardized=section.projector.standardized,
            has_projector_norm=section.projector.norm,
            has_norm_scale=section.projector.norm_scale,
            hidden_dims=tuple(section.projector.hidden_dims),
            hidden_activation=section.projector.activation,
            token_rows=section.token_rows,
            has_projector_bias=section.projector.bias,
            max_patches=section.max_patches,
            frames=section.frames,
            deepstack=tuple(section.deepstack),
            video_id=section.video_id,
            step_positions=section.step_positions,
            video_audio_id=model.video_audio_id,
            has_axis_positions=model.has_axis_positions,
            is_bidirectional=section.bidirectional,
            is_causal_without_window=section.causal_without_window,
            is_centered=model.norm is config.Norm.rms_plus_one,
        )

    @property
    def patch_shape(self) -> tuple[int, ...]:
        """Channels, frames unless images are squares, rows and columns of the pixels of a patch."""
        frames = () if self.max_patches is None else (self.frames,)
        return CHANNELS, *frames, self.patch_size, self.patch_size

    @property
    def position_shape(self) -> tuple[int, ...]:
        """Learned positions: of columns and rows, or of the patches of an image and its class token."""
        if self.axis_positions is not None:
            return 2, self.axis_positions
        return (self.patch_rows**2 + self.has_class_token,)

    @property
    def pooled_dim(self) -> int:
        """Size of the vector of a block of patches."""
        return self.emb_dim * (self.block_size**2 if self.pooling is config.Pooling.concatenate else 1)

    @property
    def block_size(self) -> int:
        """Rows and columns of the patches of a token."""
        return self.patch_rows // self.token_rows


class Projector(nnx.Module):
    """out(hidden(norm(pool(x)))): one vector of the residual stream for every square block of patches."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
        self.spec = spec
        dims = (spec.pooled_dim, *spec.hidden_dims)
        self.norm = self.build_norm(make)
        vector = (spec.pooled_dim,), ("norm",)
        self.shift = make.zeros(*vector) if spec.is_standardized else None
        self.factor = make.ones(*vector) if spec.is_standardized else None
        scale, has_bias = spec.init_scale, spec.has_projector_bias
        inner = partial(make.below("hidden").projection, scale=scale, has_bias=has_bias)
        below, axes = enumerate(pairwise(dims)), (None, "embed")
        self.hidden = nnx.Dict({str(i): inner(str(i), (E,), (F,), (None, "mlp")) for i, (E, F) in below})
        self.out = make.projection("out", dims[-1:], (spec.out_dim,), axes, scale=scale, has_bias=has_bias)

    def build_norm(self, make: ParamBuilder) -> Norm | None:
        """The norm of pooled patches; None without one."""
        spec = self.spec
        if not spec.has_projector_norm:
            return None
        if not spec.has_norm_scale:
            return PlainNorm(eps=spec.norm_eps, dtypes=spec.dtypes)
        return RMSNorm(spec.pooled_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make, is_centered=spec.is_centered)

    def __call__(self, x_IPE: jax.Array, ctx: Context) -> jax.Array:
        I, _, E = x_IPE.shape
        S = self.spec.token_rows
        size = self.spec.patch_rows // S
        blocks = x_IPE.reshape(I, S, size, S, size, E)
        if self.spec.pooling is config.Pooling.average:
            pooled = jnp.mean(blocks, axis=(2, 4))
        else:
            pooled = blocks.swapaxes(2, 3)
        return self.project(pooled.reshape(I, S * S, self.spec.pooled_dim), ctx)

    def project(self, x: jax.Array, ctx: Context) -> jax.Array:
        """[I, N, D] tokens of pooled patches."""
        x = self._standardize(x)
        x = x if self.norm is None else self.norm(x)
        for number in range(len(self.spec.hidden_dims)):
            x = apply_activation(self.spec.hidden_activation, self.hidden[str(number)](x, ctx))
        return self.out(x, ctx)

    def _standardize(self, x: jax.Array) -> jax.Array:
        """(factor of the spec * x - shift) * factor, in float32: large values cancel."""
        if self.spec.pooled_factor == 1 and self.shift is None:
            return x
        scaled = x.astype(jnp.float32) * self.spec.pooled_factor
        if self.shift is not None and self.factor is not None:
            scaled = (scaled - self.shift[...].astype(jnp.float32)) * self.factor[...].astype(jnp.float32)
        return scaled.astype(x.dtype)


class VisionTower(nnx.Module):
    """projector(norm(layers(pre_norm(patches(pixels) + positions))))."""

    def __init__(self, spec: VisionSpec, make: ParamBuilder):
        self.spec = spec
        E, inputs, bias = spec.emb_dim, spec.patch_shape, spec.has_patch_bias
        axes = (*(None for _ in inputs), "embed")
        self.patches = make.projection("patches", inputs, (E,), axes, scale=spec.init_scale, has_bias=bias)
        position_axes = (*(None for _ in spec.position_shape[1:]), "positions", "embed")
        self.positions = make.matrix(spec.position_shape, (E,), position_axes, std=E**-0.5)
        self.layers = EncoderLayer(spec, make.stacked(spec.num_layers).below("vision"))
        self.pre_norm = build_norm(spec, make) if spec.has_pre_norm else None
        self.norm = build_norm(spec, make) if spec.has_final_norm else None
        self.projector = Projector(spec, make.below("projector"))
        self.class_token = make.matrix((), (E,), ("embed",), std=E**-0.5) if spec.has_class_token else None

    def embed(self, x_BTD: jax.Array, tokens_BT: jax.Array, ctx: Context, wrap: Wrap) -> tuple[jax.Array, Context]:
        """Token embeddings with those of placeholders replaced, in order, by the tokens of the row's images.

        With fewer rows of images than of tokens, adjacent rows share their images, as those of a preference pair. Also
        returns the context of the decoder's layers. `wrap`: rematerialization of a layer.
        """
        assert ctx.images is not None
        B, count, *pixels = ctx.images.shape
        features_IND = self(ctx.images.reshape(B * count, *pixels), ctx.for_encoder(B * count), wrap)
        features_BND = features_IND.reshape(B, -1, features_IND.shape[-1])
        features_BND = jnp.repeat(features_BND, len(tokens_BT) // B, axis=0)
        is_image_BT = tokens_BT == self.spec.placeholder_id
        x_BTD = replace_placeholders(x_BTD, features_BND, is_image_BT)
        return x_BTD, dataclasses.replace(ctx, images=None, **self.attention_values(is_image_BT))

    def attention_values(self, is_image_BT: jax.Array) -> dict[str, Any]:
        """Fields of the context by which the tokens of an image attend to each other."""
        if not self.spec.is_bidirectional:
            return {"image_groups_BT": None}
        groups_BT = image_groups(is_image_BT)
        return {"image_groups_BT": groups_BT, "groups_need_window": self.spec.is_causal_without_window}

    def normalize(self, x_IPE: jax.Array) -> jax.Array:
        """The outputs of the last layer, normalized if the encoder has a final norm."""
        return x_IPE if self.norm is None else self.norm(x_IPE)

    @jax.named_scope("vision")
    def __call__(self, pixels: jax.Array, ctx: Context, wrap: Wrap) -> jax.Array:
        """[I, N, D] tokens of images [I, height, width, channels]."""
        spec = self.spec
        I, S, size = len(pixels), spec.patch_rows, spec.patch_size
        patches = pixels.astype(spec.dtypes.compute).reshape(I, S, size, S, size, CHANNELS).transpose(0, 1, 3, 5, 2, 4)
        x_IPE = self.patches(patches.reshape(I, S * S, CHANNELS, size, size), ctx)
        if self.class_token is not None:
            token_1E = self.class_token[...].astype(x_IPE.dtype)[None]
            x_IPE = jnp.concatenate([x_IPE, jnp.broadcast_to(token_1E, (I, *token_1E.shape))], axis=1)
        x_IPE = x_IPE + self.positions[...].astype(x_IPE.dtype)
        x_IPE = x_IPE if self.pre_norm is None else self.pre_norm(x_IPE)
        positions_1P2 = jnp.asarray(_coordinates(spec))
        x_IPE = run_layers(self.layers, x_IPE, positions_1P2, ctx, wrap)
        return self.projector(self.normalize(x_IPE)[:, : S * S], ctx)


def _coordinates(spec: VisionSpec) -> np.ndarray:
    """[1, P, 2] column and row of each patch, from 1; the class token is at 0, where RoPE does not rotate."""
    rows, columns = np.indices((spec.patch_rows, spec.patch_rows)).reshape(2, -1) + 1
    return np.pad(np.stack([columns, rows], axis=-1), ((0, int(spec.has_class_token)), (0, 0)))[None]


def image_groups(is_image_BT: jax.Array) -> jax.Array:
    """[B, T] number of the run of placeholders that a token is part of; 0 for other tokens."""
    before_BT = jnp.pad(is_image_BT, ((0, 0), (1, 0)))[:, :-1]
    return jnp.where(is_image_BT, jnp.cumsum(is_image_BT & ~before_BT, axis=1), 0)
