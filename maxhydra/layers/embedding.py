"""Embedding and head: token ids to vectors, and vectors to logits or a score; per-layer embeddings.

With per-layer embeddings (Gemma 3n, 2025) every layer gets its own embedding of each token.

B batch, T tokens, D residual stream, V vocabulary, L layers, P size of a per-layer embedding.
"""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.config.schema.encoders import placeholders
from maxhydra.kernels.fused_linear import matmul_argmax
from maxhydra.kernels.int8_weight_matmul import int8_weight_matmul
from maxhydra.kernels.matmul import Layout, project, widening_einsum
from maxhydra.layers.context import Context
from maxhydra.layers.low_rank import Factors, factors_of
from maxhydra.layers.mlp import gated
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale, width_ratio
from maxhydra.layers.quant.int8 import Int8, Int8Parts, quantized, rounded_weight, take_rows
from maxhydra.layers.quant.training import (
    QatMatmul,
    QuantRule,
    is_qat,
    round_inputs,
    straight_through,
    straight_through_matmul,
)
from maxhydra.layers.table_lookup import look_up


@dataclasses.dataclass(frozen=True)
class VocabularySpec:
    """Sizes and options of embedding and head, resolved from the config."""

    vocab_size: int
    emb_dim: int
    factor: float
    """Factor on the embeddings of tokens."""
    hidden_factor: float
    """Factor on the final hidden states, and so on the logits."""
    positions: int | None
    """Number of learned position embeddings; None without any."""
    is_sinusoidal: bool
    """Whether sines and cosines of the position are added."""
    softcap: float | None
    layout: Layout
    init_scale: float
    embedding_std: float
    head_std: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "VocabularySpec":
        # muP: embeddings of constant variance, and logits that fall with the width (model.transfer).
        ratio, std = width_ratio(model), model.init_scale * model.emb_dim**-0.5
        is_scaled = model.embedding.scale is config.EmbeddingScale.root_dim
        return cls(
            vocab_size=model.vocab_size,
            emb_dim=model.emb_dim,
            factor=model.multipliers.embedding * (model.emb_dim**0.5 if is_scaled else 1),
            hidden_factor=1 / model.multipliers.logit_divisor,
            positions=model.context_length if model.embedding.positions is config.Positions.learned else None,
            is_sinusoidal=model.embedding.positions is config.Positions.sinusoidal,
            softcap=model.logit_softcap,
            layout=Layout(model.kernels.projection.value),
            init_scale=model.init_scale,
            embedding_std=std * ratio**0.5,
            head_std=std * ratio**-0.5,
            dtypes=Dtypes.of(model.dtypes),
        )


class Embedding(nnx.Module):
    """Token embeddings, and with tied weights (Press and Wolf, 2017) also the head."""

    def __init__(self, spec: VocabularySpec, make: ParamBuilder):
        self.spec = spec
        # emb_dim^-1/2, so that a tied head maps normalized activations to logits of variance init_scale^2. As an input
        # the scale of a row does not matter: every branch normalizes the residual stream before reading it.
        std = spec.embedding_std
        sizes = (spec.vocab_size, spec.emb_dim)
        self.table, self.lora = make.vocabulary_matrix("embedding", *sizes, ("vocab", "embed"), std=std)
        self.format = make.named("embedding")[1]
        shape = None if spec.positions is None else ((spec.positions,), (spec.emb_dim,))
        self.positions = None if shape is None else make.matrix(*shape, ("positions", "embed"), std=std)

    @jax.named_scope("embedding")
    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array, ctx: Context) -> jax.Array:
        """[B, T, D] embeddings; an id outside the vocabulary gives NaN, which shows up in the loss."""
        compute = self.spec.dtypes.compute
        if isinstance(self.table, Int8):
            rows_BTD = take_rows(self.table.parts, tokens_BT, compute)
        else:
            rows_BTD = look_up(self.table[...], tokens_BT, ctx, dtype=compute)
        if is_qat(self.format):
            rows_BTD = straight_through(partial(rounded_weight, over=(-1,)), rows_BTD)
        if (update := factors_of(self.lora, compute, is_adapted=ctx.is_adapted)) is not None:
            low_rank_BTR = look_up(update.a, tokens_BT, ctx, dtype=compute, axes=("vocab", None))
            rows_BTD = rows_BTD + low_rank_BTR @ update.b
        return self._scale_and_position(rows_BTD, positions_BT)

    def _scale_and_position(self, rows_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Embeddings scaled, with positions added. Positions of padding may be out of range and are clipped."""
        if self.spec.factor != 1:
            rows_BTD = rows_BTD * jnp.asarray(self.spec.factor, rows_BTD.dtype)
        if self.spec.is_sinusoidal:
            return rows_BTD + sinusoids(positions_BT, self.spec.emb_dim).astype(rows_BTD.dtype)
        if self.positions is None:
            return rows_BTD
        return rows_BTD + jnp.take(self.positions[...], positions_BT, axis=0, mode="clip").astype(rows_BTD.dtype)

    def logits(self, hidden: jax.Array, *, is_single_device: bool, is_adapted: bool = True) -> jax.Array:
        """Logits [..., V] of hidden states [..., D]; `is_single_device`: on one device."""
        matmul = _HeadMatmul("...D,VD->...V", 1, self.format, is_single_device)
        update = factors_of(self.lora, self.spec.dtypes.compute, is_adapted=is_adapted)
        head_update = None if update is None else Factors(update.b.T, update.a.T)
        return _logits(matmul, hidden, self.table, head_update, self.spec)

    def largest_logit(self, hidden_BD: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Largest logit [B] and its token by one kernel, on one device; None if all logits must be computed."""
        if self.lora is not None:
            return None
        return _largest(
            _HeadMatmul("...D,VD->...V", 1, self.format, is_single_device=True), hidden_BD, self.table, self.spec
        )


def sinusoids(positions_BT: jax.Array, dim: int) -> jax.Array:
    """[B, T, D] sines, then cosines, of the positions at wavelengths from 2 pi to 20000 pi (Vaswani et al., 2017)."""
    half = dim // 2
    frequencies = 10000.0 ** (-jnp.arange(half, dtype=jnp.float32) / max(half - 1, 1))
    angles = positions_BT.astype(jnp.float32)[..., None] * frequencies
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


class Head(nnx.Module):
    """An LM head with its own weights."""

    def __init__(self, spec: VocabularySpec, make: ParamBuilder):
        self.spec = spec
        shape = (spec.emb_dim, spec.vocab_size)
        self.kernel, self.lora = make.vocabulary_matrix("head", *shape, ("embed", "vocab"), std=spec.head_std)
        self.format = make.named("head")[1]

    def logits(self, hidden: jax.Array, *, is_single_device: bool, is_adapted: bool = True) -> jax.Array:
        """Logits [..., V] of hidden states [..., D]; `is_single_device`: on one device."""
        matmul = _HeadMatmul("...D,DV->...V", 0, self.format, is_single_device)
        update = factors_of(self.lora, self.spec.dtypes.compute, is_adapted=is_adapted)
        return _logits(matmul, hidden, self.kernel, update, self.spec)

    def largest_logit(self, hidden_BD: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """Largest logit [B] and its token by one kernel, on one device; None if all logits must be computed."""
        if self.lora is not None:
            return None
        return _largest(
            _HeadMatmul("...D,DV->...V", 0, self.format, is_single_device=True), hidden_BD, self.kernel, self.spec
        )


class ScoreHead(nnx.Module):
    """The head of a reward model: one number per token, in float32 and without a softcap.

    It starts at zero, so that all rewards are equal at first.
    """

    def __init__(self, spec: VocabularySpec, make: ParamBuilder):
        self.kernel = make.zeros((spec.emb_dim,), ("embed",))

    def __call__(self, hidden: jax.Array) -> jax.Array:
        """Scores [...] of hidden states [..., D]."""
        # Not a matmul, whose precision would be that of the hardware's default.
        return jnp.sum(hidden.astype(jnp.float32) * self.kernel[...].astype(jnp.float32), axis=-1)


class _HeadMatmul(NamedTuple):
    """Static arguments of the matmul with a vocabulary matrix."""

    equation: str
    summed: int
    """The contracted dimension of the weight."""
    format: QuantRule | None
    """Quantization rule of the weight."""
    is_single_device: bool


def _logits(
    matmul: _HeadMatmul, hidden: jax.Array, weight: nnx.Param | Int8, update: Factors | None, spec: VocabularySpec
) -> jax.Array:
    """Logits with softcap * tanh(logits / softcap) applied, if there is a softcap (Gemma 2, 2024).

    `update`: the LoRA update of the weight, from hidden states to the vocabulary.
    """
    dtypes = spec.dtypes

    def int8_matmul(hidden: jax.Array, parts: Int8Parts) -> jax.Array:
        codes_DV = parts.codes.T if matmul.summed else parts.codes
        return int8_weight_matmul(
            hidden,
            codes_DV,
            parts.scales,
            layout=spec.layout,
            is_single_device=matmul.is_single_device,
            dtype=dtypes.logits,
        )

    def plain(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return project(matmul.equation, hidden, weight, layout=spec.layout, dtype=dtypes.logits)

    if isinstance(weight, Int8):
        logits = int8_matmul(hidden, weight.parts)
    elif is_qat(matmul.format):
        over = (matmul.summed,)
        rounded = partial(rounded_weight, over=over)
        qat = QatMatmul(lambda x, weight: int8_matmul(x, quantized(weight, over)), rounded, plain)
        logits = straight_through_matmul(
            qat, round_inputs(matmul.format, hidden, inputs=1), weight[...].astype(dtypes.compute)
        )
    else:
        logits = plain(hidden, weight[...].astype(dtypes.compute))
    if update is not None:
        logits = logits + widening_einsum("...R,RV->...V", hidden @ update.a, update.b, dtype=dtypes.logits)
    return logits if spec.softcap is None else spec.softcap * jnp.tanh(logits / spec.softcap)


def _largest(
    matmul: _HeadMatmul, hidden_BD: jax.Array, weight: nnx.Param | Int8, spec: VocabularySpec
) -> tuple[jax.Array, jax.Array] | None:
    """Largest logit by the argmax kernel: for plain logits and a weight in the layout of the kernel."""
    is_plain = spec.layout is Layout.joined and spec.softcap is None and not is_qat(matmul.format)
    if isinstance(weight, Int8) or not is_plain:
        return None
    weight_VD = weight[...].astype(hidden_BD.dtype)
    weight_VD = weight_VD if matmul.summed else weight_VD.T
    return matmul_argmax(hidden_BD, weight_VD, dtype=spec.dtypes.logits)


# Token of padding, whose per-layer embedding the tokens of images and audio have.
PADDING_ID = 0


@dataclasses.dataclass(frozen=True)
class PerLayerSpec:
    """Sizes of per-layer embeddings, resolved from the config."""

    dim: int
    layers: int
    vocab_size: int
    emb_dim: int
    placeholders: tuple[int, ...]
    """Tokens of images and audio, which have the embedding of padding."""
    activation: config.Activation
    norm: NormSpec
    init_scale: float
    out_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "PerLayerSpec | None":
        """None for models without them."""
        if model.per_layer.dim is None:
            return None
        return cls(
            dim=model.per_layer.dim,
            layers=model.num_layers,
            vocab_size=model.vocab_size,
            emb_dim=model.emb_dim,
            placeholders=placeholders(model.vision, model.audio),
            activation=model.per_layer.activation,
            norm=NormSpec.of(model),
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )

    def forward_flops(self) -> float:
        """Forward FLOPs per token and layer: its share of the context projection, and its gate and out projections."""
        return 2.0 * 3 * self.emb_dim * self.dim


class PerLayerEmbedding(nnx.Module):
    """(norm(context(x) / sqrt(D)) + sqrt(P) * table[token]) / sqrt(2), where x is the token's main embedding."""

    def __init__(self, spec: PerLayerSpec, make: ParamBuilder):
        self.spec = spec
        width = spec.layers * spec.dim
        std = spec.init_scale * spec.dim**-0.5
        self.table = make.matrix((spec.vocab_size,), (width,), ("vocab", "embed"), std=std)
        self.context = make.projection("context", (spec.emb_dim,), (width,), ("embed", None), scale=spec.init_scale)
        self.norm = spec.norm.build(spec.dim, make)

    @jax.named_scope("per_layer")
    def __call__(self, tokens_BT: jax.Array, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        """Embeddings of the tokens for all layers, [L, B, T, P]."""
        spec = self.spec
        if spec.placeholders:
            is_media_BT = jnp.isin(tokens_BT, jnp.asarray(spec.placeholders))
            tokens_BT = jnp.where(is_media_BT, PADDING_ID, tokens_BT)
        rows = jnp.take(self.table[...], tokens_BT, axis=0, mode="fill", fill_value=jnp.nan)
        table_BTLP = self._by_layer(rows.astype(spec.dtypes.compute)) * spec.dim**0.5
        context_BTLP = self.norm(self._by_layer(self.context(x_BTD, ctx)) * spec.emb_dim**-0.5)
        out_LBTP = jnp.moveaxis((context_BTLP + table_BTLP) * 2**-0.5, 2, 0)
        return ctx.constrain(out_LBTP.astype(spec.dtypes.compute), None, "act_batch", "act_length", None)

    def _by_layer(self, x_BTW: jax.Array) -> jax.Array:
        return x_BTW.reshape(*x_BTW.shape[:2], self.spec.layers, self.spec.dim)


class PerLayerInput(nnx.Module):
    """norm(out(activation(gate(x)) * embedding)), which a layer adds to the residual stream."""

    def __init__(self, spec: PerLayerSpec, make: ParamBuilder):
        self.spec = spec
        D, P = spec.emb_dim, spec.dim
        self.gate = make.projection("gate", (D,), (P,), ("embed", None), scale=spec.init_scale)
        self.out = make.projection("out", (P,), (D,), (None, "embed"), scale=spec.out_scale)
        self.norm = spec.norm.build(D, make)

    @jax.named_scope("per_layer")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        assert ctx.layer_input is not None
        gated_BTP = gated(self.spec.activation, self.gate(x_BTD, ctx), ctx.layer_input)
        out_BTD = self.norm(self.out(gated_BTP, ctx))
        return ctx.to_stream(out_BTD)


def replace_placeholders(
    x_BTD: jax.Array, features_BND: jax.Array, is_placeholder_BT: jax.Array, index_BT: jax.Array | None = None
) -> jax.Array:
    """Embeddings with those of placeholders replaced, in order, by the features of the row's images or audio clips.

    A placeholder without a feature gets NaN, which shows up in the loss. `index_BT`: the feature of each placeholder,
    if some are skipped.
    """
    if index_BT is None:
        index_BT = jnp.maximum(jnp.cumsum(is_placeholder_BT, axis=1) - 1, 0)
    chosen_BTD = jnp.take_along_axis(features_BND, index_BT[:, :, None], axis=1, mode="fill", fill_value=jnp.nan)
    return jnp.where(is_placeholder_BT[:, :, None], chosen_BTD.astype(x_BTD.dtype), x_BTD)
