"""The two ends of the model: token ids to vectors, and vectors to logits over the vocabulary. B batch, T tokens."""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config import model as config
from maxhydra.kernels.einsum import Layout, projected
from maxhydra.kernels.int8 import int8_product
from maxhydra.layers.int8 import Int8, rows
from maxhydra.layers.weights import Dtypes, WeightMaker


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

    def __init__(self, spec: VocabularySpec, make: WeightMaker):
        self.spec = spec
        # emb_dim^-1/2, so that a tied head turns normalised activations into logits of variance init_scale^2. As an
        # input the size of a row is free: every branch normalises the stream before reading it.
        std = spec.init_scale * spec.emb_dim**-0.5
        self.table = make.end("embedding", spec.vocab_size, spec.emb_dim, ("vocab", "embed"), std=std)
        count = spec.positions
        at = None if count is None else make.matrix((count,), (spec.emb_dim,), ("positions", "embed"), std=std)
        self.positions = at

    @jax.named_scope("embedding")
    def __call__(self, tokens_BT: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Rows of the tokens; an id outside the vocabulary gives NaN, which the loss then shows."""
        if isinstance(self.table, Int8):
            found = rows(self.table.parts, tokens_BT, self.spec.dtypes.compute)
        else:
            found = jnp.take(self.table[...], tokens_BT, axis=0, mode="fill", fill_value=jnp.nan)
        return self._placed(found.astype(self.spec.dtypes.compute), positions_BT)

    def _placed(self, rows_BTD: jax.Array, positions_BT: jax.Array) -> jax.Array:
        """Rows at their scale and with their positions. Padding stands anywhere: what is out of reach is clipped."""
        if self.spec.is_scaled:
            rows_BTD = rows_BTD * jnp.asarray(self.spec.emb_dim**0.5, rows_BTD.dtype)
        if self.positions is None:
            return rows_BTD
        return rows_BTD + jnp.take(self.positions[...], positions_BT, axis=0, mode="clip").astype(rows_BTD.dtype)

    def logits(self, hidden: jax.Array, *, is_alone: bool) -> jax.Array:
        """[..., D] to [..., V]; is_alone: on one device."""
        return _logits("...D,VD->...V", hidden, self.table, self.spec, is_alone=is_alone)


class Head(nnx.Module):
    """An output projection of its own."""

    def __init__(self, spec: VocabularySpec, make: WeightMaker):
        self.spec = spec
        std = spec.init_scale * spec.emb_dim**-0.5
        self.kernel = make.end("head", spec.emb_dim, spec.vocab_size, ("embed", "vocab"), std=std)

    def logits(self, hidden: jax.Array, *, is_alone: bool) -> jax.Array:
        """[..., D] to [..., V]; is_alone: on one device."""
        return _logits("...D,DV->...V", hidden, self.kernel, self.spec, is_alone=is_alone)


def _logits(
    equation: str, hidden: jax.Array, weight: nnx.Param | Int8, spec: VocabularySpec, *, is_alone: bool
) -> jax.Array:
    """The product, then softcap * tanh(logits / softcap): logits within -softcap and softcap (Gemma 2, 2024)."""
    if isinstance(weight, Int8):
        codes, scales_V = weight.parts.codes, weight.parts.scales
        codes_DV = codes if ",DV->" in equation else codes.T
        layout, dtype = spec.layout, spec.dtypes.logits
        logits = int8_product(hidden, codes_DV, scales_V, layout=layout, is_alone=is_alone, dtype=dtype)
    else:
        weights = weight[...].astype(spec.dtypes.compute)
        logits = projected(equation, hidden, weights, layout=spec.layout, dtype=spec.dtypes.logits)
    return logits if spec.softcap is None else spec.softcap * jnp.tanh(logits / spec.softcap)
