"""One layer of the decoder. B batch, T tokens, D residual stream."""

import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxhydra.config import model as config
from maxhydra.layers import (
    AttentionSpec,
    Cache,
    Context,
    DeltaSpec,
    Dtypes,
    FeedForward,
    FeedForwardSpec,
    Mixer,
    MixerSpec,
    MlaSpec,
    MlpSpec,
    MoeSpec,
    RMSNorm,
    Room,
    Side,
    WeightMaker,
    dropout,
)

MIXERS: dict[config.Mixer, type[AttentionSpec] | type[DeltaSpec] | type[MlaSpec]] = {
    config.Mixer.attention: AttentionSpec,
    config.Mixer.delta: DeltaSpec,
    config.Mixer.mla: MlaSpec,
}
FEED_FORWARDS: dict[config.FeedForward, type[MlpSpec] | type[MoeSpec]] = {
    config.FeedForward.mlp: MlpSpec,
    config.FeedForward.moe: MoeSpec,
}


class Left(NamedTuple):
    """What a layer leaves."""

    x_BTD: jax.Array
    cache: Any
    """The successor of its cache; None without one."""
    sides: dict[str, Side]
    """What its mixer and its feed-forward tell besides, where they do."""


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One layer kind, resolved."""

    name: str
    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    emb_dim: int
    norm_eps: float
    dropout: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, name: str) -> "BlockSpec":
        kind = model.kinds[name]
        return cls(
            name=name,
            mixer=MIXERS[kind.mixer].of(model, kind),
            feed_forward=FEED_FORWARDS[kind.feed_forward].of(model, kind),
            emb_dim=model.emb_dim,
            norm_eps=model.norm_eps,
            dropout=model.dropout,
            dtypes=Dtypes.of(model.dtypes),
        )


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), whatever mixer and feed-forward go by these names."""

    def __init__(self, spec: BlockSpec, make: WeightMaker):
        self.spec = spec
        self.attention_norm = RMSNorm(spec.emb_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.attention: Mixer = spec.mixer.build(make.below("attention"))
        self.mlp_norm = RMSNorm(spec.emb_dim, eps=spec.norm_eps, dtypes=spec.dtypes, make=make)
        self.mlp: FeedForward = spec.feed_forward.build(make.below("mlp"))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> Left:
        x_BTD = ctx.constrain(x_BTD, "act_batch", "act_length", "act_embed")
        mixed = self.attention(self.attention_norm(x_BTD), ctx)
        x_BTD = x_BTD + dropout(mixed.out_BTD, ctx.key(0), rate=self.spec.dropout)
        fed = self.mlp(self.mlp_norm(x_BTD), ctx)
        x_BTD = x_BTD + dropout(fed.out_BTD, ctx.key(1), rate=self.spec.dropout)
        sides = {"attention": mixed.side, "mlp": fed.side}
        return Left(x_BTD, mixed.cache, {name: side for name, side in sides.items() if side})

    def empty_cache(self, room: Room, layers: int) -> Cache:
        return self.attention.empty_cache(room, layers)
