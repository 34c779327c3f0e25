"""Per-layer embeddings (Gemma 3n, 2025): every layer gets its own embedding of each token.

B batch, T tokens, D residual stream, L layers, P size of a per-layer embedding, V vocabulary.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.mlp import gated
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale


@dataclasses.dataclass(frozen=True)
class PerLayerSpec:
    """Sizes of per-layer embeddings, resolved from the config."""

    dim: int
    layers: int
    vocab_size: int
    emb_dim: int
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
        return ctx.constrain(out_BTD, "act_batch", "act_length", "act_embed")
