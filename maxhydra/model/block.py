"""One layer of the decoder. B batch, T tokens, D residual stream."""

import dataclasses
from typing import Any

import jax
from flax import nnx

from maxhydra.config import model as config
from maxhydra.layers import (
    Attention,
    AttentionSpec,
    Cache,
    Context,
    Dtypes,
    Mlp,
    MlpSpec,
    RMSNorm,
    Room,
    WeightMaker,
    dropout,
)


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One layer kind, resolved."""

    name: str
    attention: AttentionSpec
    mlp: MlpSpec
    emb_dim: int
    norm_eps: float
    dropout: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, name: str) -> "BlockSpec":
        kind = model.kinds[name]
        return cls(
            name=name,
            attention=AttentionSpec.of(model, kind),
            mlp=MlpSpec.of(model, kind),
            emb_dim=model.emb_dim,
            norm_eps=model.norm_eps,
            dropout=model.dropout,
            dtypes=Dtypes.of(model.dtypes),
        )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, spec: BlockSpec, make: WeightMaker):
        self.spec = spec
        self.attention_norm = RMSNorm(spec.emb_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.attention = Attention(spec.attention, make.below("attention"))
        self.mlp_norm = RMSNorm(spec.emb_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.mlp = Mlp(spec.mlp, make.below("mlp"))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        x_BTD = ctx.constrain(x_BTD, "act_batch", "act_length", "act_embed")
        mixed_BTD, cache = self.attention(self.attention_norm(x_BTD), ctx)
        x_BTD = x_BTD + dropout(mixed_BTD, ctx.key(0), rate=self.spec.dropout)
        fed_BTD = self.mlp(self.mlp_norm(x_BTD), ctx)
        return x_BTD + dropout(fed_BTD, ctx.key(1), rate=self.spec.dropout), cache

    def empty_cache(self, room: Room, layers: int) -> Cache:
        return self.attention.empty_cache(room, layers)
