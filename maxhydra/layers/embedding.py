"""The two ends of the model: token ids to vectors, and vectors to logits over the vocabulary. B batch, T tokens."""

import dataclasses
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.fused_linear import largest_output
from maxhydra.kernels.int8_weight_matmul import int8_product
from maxhydra.kernels.matmul import Layout, projected
from maxhydra.layers.params import Dtypes, ParamBuilder
from maxhydra.layers.quant.int8 import Int8, Int8Parts, quantized, rounded_weight, rows
from maxhydra.layers.quant.qat import QatMatmul, entering, is_trained_for, straight, straight_product
from maxhydra.layers.quant.rules import QuantRule


@dataclasses.dataclass(frozen=True)
class VocabularySpec:
    """Sizes of both ends."""

    vocab_size: int
    emb_dim: int
    is_scaled: bool
    """Whether the embedding's rows are multiplied by the square root of emb_dim."""
    positions: int | None
    """How many positions have a vector of their own; None: none."""
    softcap: float | None
    layout: Layout
    init_scale: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model) -> "VocabularySpec":
        return cls(
            vocab_size=model.vocab_size,
            emb_dim=model.emb_dim,
            is_scaled=model.embedding.scale is config.EmbeddingScale.root_dim,
            positions=model.context_length if model.embedding.positions is config.Positions.learned else None,
            softcap=model.logit_softcap,
            layout=Layout(model.kernels.projection.value),
            init_scale=model.init_scale,
            dtypes=Dtypes.of(model.dtypes),
        )


class Embedding(nnx.Module):
    """A row of the table per token; as a tied head (Press and Wolf, 2017), a logit per row."""

    def __init__(self, spec: VocabularySpec, make: ParamBuilder):
        self.spec = spec
        # emb_dim^-1/2, so that a tied head turns normalised activations into logits of variance init_scale^2. As an
        # input the size of a row is free: every branch normalises the stream before reading it.
        std = spec.init_scale * spec.emb_dim**-0.5
        self.table = make.end("embedding", spec.vocab_size, spec.emb_dim, ("vocab", "embed"), std=std)
        self.format = make.named("embedding")[1]
        count = spec.positions
        at = None if count is None else make.matrix((count,), (spec.emb_dim,), ("positions", "embed"), std=std)
        self.positions = at

    @jax.named_scope("embedding")
    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Rows of the tokens; an id outside the vocabulary gives NaN, which the loss then shows."""
        compute = self.spec.dtypes.compute
        if isinstance(self.table, Int8):
            return self._placed(rows(self.table.parts, tokens_BT, compute), positions_BT)
        found = jnp.take(self.table[...], tokens_BT, axis=0, mode="fill", fill_value=jnp.nan).astype(compute)
        if is_trained_for(self.format):
            found = straight(partial(rounded_weight, over=(-1,)), found)
        return self._placed(found, positions_BT)

    def _placed(self, rows_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Rows at their scale and with their positions. Padding stands anywhere: what is out of reach is clipped."""
        if self.spec.is_scaled:
            rows_BTD = rows_BTD * jnp.asarray(self.spec.emb_dim**0.5, rows_BTD.dtype)
        if self.positions is None:
            return rows_BTD
        return rows_BTD + jnp.take(self.positions[...], positions_BT, axis=0, mode="clip").astype(rows_BTD.dtype)

    def logits(self, hidden: jax.Array, *, is_alone: bool) -> jax.Array:
        """[..., D] to [..., V]; is_alone: on one device."""
        form = _Form("...D,VD->...V", 1, self.format, is_alone)
        return _logits(form, hidden, self.table, self.spec)

    def largest_logit(self, hidden_BD: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """The largest logit [B] and its token, on one device; None where that takes all logits."""
        return _largest(_Form("...D,VD->...V", 1, self.format, is_alone=True), hidden_BD, self.table, self.spec)


class Head(nnx.Module):
    """An output projection of its own."""

    def __init__(self, spec: VocabularySpec, make: ParamBuilder):
        self.spec = spec
        std = spec.init_scale * spec.emb_dim**-0.5
        self.kernel = make.end("head", spec.emb_dim, spec.vocab_size, ("embed", "vocab"), std=std)
        self.format = make.named("head")[1]

    def logits(self, hidden: jax.Array, *, is_alone: bool) -> jax.Array:
        """[..., D] to [..., V]; is_alone: on one device."""
        form = _Form("...D,DV->...V", 0, self.format, is_alone)
        return _logits(form, hidden, self.kernel, self.spec)

    def largest_logit(self, hidden_BD: jax.Array) -> tuple[jax.Array, jax.Array] | None:
        """The largest logit [B] and its token, on one device; None where that takes all logits."""
        return _largest(_Form("...D,DV->...V", 0, self.format, is_alone=True), hidden_BD, self.kernel, self.spec)


class _Form(NamedTuple):
    """What is static of a product with an end of the model."""

    equation: str
    summed: int
    """The dimension of the weight that is summed over."""
    format: QuantRule | None
    """Of the weight."""
    is_alone: bool


def _logits(form: _Form, hidden: jax.Array, weight: nnx.Param | Int8, spec: VocabularySpec) -> jax.Array:
    """The product, then softcap * tanh(logits / softcap): logits within -softcap and softcap (Gemma 2, 2024)."""
    dtypes = spec.dtypes

    def packed(hidden: jax.Array, parts: Int8Parts) -> jax.Array:
        codes_DV = parts.codes.T if form.summed else parts.codes
        return int8_product(
            hidden, codes_DV, parts.scales, layout=spec.layout, is_alone=form.is_alone, dtype=dtypes.logits
        )

    def plain(hidden: jax.Array, weight: jax.Array) -> jax.Array:
        return projected(form.equation, hidden, weight, layout=spec.layout, dtype=dtypes.logits)

    if isinstance(weight, Int8):
        logits = packed(hidden, weight.parts)
    elif is_trained_for(form.format):
        over = (form.summed,)
        way = QatMatmul(lambda x, weight: packed(x, quantized(weight, over)), partial(rounded_weight, over=over), plain)
        logits = straight_product(way, entering(form.format, hidden, inputs=1), weight[...].astype(dtypes.compute))
    else:
        logits = plain(hidden, weight[...].astype(dtypes.compute))
    return logits if spec.softcap is None else spec.softcap * jnp.tanh(logits / spec.softcap)


def _largest(
    form: _Form, hidden_BD: jax.Array, weight: nnx.Param | Int8, spec: VocabularySpec
) -> tuple[jax.Array, jax.Array] | None:
    """By a kernel, where logits are a product and nothing else, with a weight that lies as it reads it."""
    is_plain = spec.layout is Layout.joined and spec.softcap is None and not is_trained_for(form.format)
    if isinstance(weight, Int8) or not is_plain:
        return None
    kept = weight[...].astype(hidden_BD.dtype)
    return largest_output(hidden_BD, kept if form.summed else kept.T, dtype=spec.dtypes.logits)
