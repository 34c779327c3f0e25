"""One layer of the decoder. B batch, T tokens, D residual stream."""

import dataclasses
from typing import Any, NamedTuple

import jax
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.fused_linear import Norm as Factors
from maxhydra.layers import (
    Attention,
    AttentionSpec,
    AuxOutputs,
    Cache,
    CacheSpec,
    Context,
    DeltaSpec,
    FeedForward,
    FeedForwardOutput,
    FeedForwardSpec,
    Mixer,
    MixerOutput,
    MixerSpec,
    MlaSpec,
    Mlp,
    MlpSpec,
    MoeSpec,
    Norm,
    NormSpec,
    ParallelMoe,
    ParallelMoeSpec,
    ParamBuilder,
    PerLayerInput,
    PerLayerSpec,
    RMSNorm,
    dropout,
    norm_with_residual,
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


class BlockOutput(NamedTuple):
    """What a layer leaves."""

    x_BTD: jax.Array
    cache: Any
    """The successor of its cache; None without one."""
    sides: dict[str, AuxOutputs]
    """What its mixer and its feed-forward tell besides, where they do."""
    handed: Any
    """What its mixer hands on to later layers; None: nothing."""
    normed_BTD: jax.Array | None = None
    """What the next layer's first norm makes of it, where it was made along."""


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """One layer kind, resolved."""

    name: str
    mixer: MixerSpec
    feed_forward: FeedForwardSpec
    beside: ParallelMoeSpec | None
    per_layer: PerLayerSpec | None
    is_scaled: bool
    emb_dim: int
    norms: config.Norms
    norm: NormSpec
    dropout: float

    @classmethod
    def of(cls, model: config.Model, name: str) -> "BlockSpec":
        kind = model.kinds[name]
        return cls(
            name=name,
            mixer=MIXERS[kind.mixer].of(model, kind),
            feed_forward=FEED_FORWARDS[kind.feed_forward].of(model, kind),
            beside=ParallelMoeSpec.of(model, kind),
            per_layer=PerLayerSpec.of(model),
            is_scaled=kind.is_scaled,
            emb_dim=model.emb_dim,
            norms=kind.norms,
            norm=NormSpec.of(model),
            dropout=model.dropout,
        )

    def settled(self, new: Any, old: Any, sides: dict[str, AuxOutputs]) -> Any:
        """The weights that a training step made of old ones, with what changes by what the layers told instead, and
        the layer's constant as it was: it has no gradient, but would decay."""
        if "scale" in new:
            new = {**new, "scale": old["scale"]}
        if "mlp" not in sides or "mlp" not in new:
            return new
        return {**new, "mlp": self.feed_forward.settled(new["mlp"], old["mlp"], sides["mlp"])}

    def idle_parameters(self) -> int:
        """Weights that a token does not meet."""
        return self.feed_forward.idle_parameters() + (self.beside.moe.idle_parameters() if self.beside else 0)

    def forward_flops(self, seq_len: int) -> float:
        """Operations of a forward pass per token of sequences of this length."""
        beside = 0.0 if self.beside is None else self.beside.moe.forward_flops()
        own = 0.0 if self.per_layer is None else self.per_layer.forward_flops()
        return self.mixer.forward_flops(seq_len) + self.feed_forward.forward_flops() + beside + own


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), whatever mixer and feed-forward go by these names.

    Norms may stand behind attention and mlp instead, or on both sides.
    """

    def __init__(self, spec: BlockSpec, make: ParamBuilder):
        self.spec = spec
        has_pre, has_post = spec.norms is not config.Norms.post, spec.norms is not config.Norms.pre
        self.attention_norm = self._norm(make, has_pre)
        self.attention: Mixer = spec.mixer.build(make.below("attention"))
        self.attention_post_norm = self._norm(make, has_post)
        self.mlp_norm = self._norm(make, has_pre)
        self.mlp: FeedForward = spec.feed_forward.build(make.below("mlp"))
        self.beside = None if spec.beside is None else ParallelMoe(spec.beside, make.below("beside"))
        self.mlp_post_norm = self._norm(make, has_post)
        own = spec.per_layer
        self.per_layer = None if own is None else PerLayerInput(own, make.below("per_layer"))
        self.scale = make.ones((1,), ("norm",)) if spec.is_scaled else None

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> BlockOutput:
        x_BTD = ctx.constrain(x_BTD, "act_batch", "act_length", "act_embed")
        mixed = self._mixed(x_BTD, ctx)
        x_BTD, ctx = ctx.taken(mixed.out_BTD), dataclasses.replace(ctx, normed=mixed.normed_BTD).of_asked()
        fed, sides = self._fed(x_BTD, ctx)
        x_BTD, sides["attention"] = fed.out_BTD, mixed.side
        if self.per_layer is not None:
            x_BTD = x_BTD + self.per_layer(x_BTD, ctx)
        if self.scale is not None:
            x_BTD = x_BTD * jax.lax.stop_gradient(self.scale[...]).astype(x_BTD.dtype)
        return BlockOutput(
            x_BTD, mixed.cache, {name: side for name, side in sides.items() if side}, mixed.handed, fed.normed_BTD
        )

    def _mixed(self, x_BTD: jax.Array, ctx: Context) -> MixerOutput:
        """x + attention(norm(x)), and what the mixer gives besides."""
        norm, post_norm = self.attention_norm, self.attention_post_norm
        if isinstance(self.attention, Attention) and post_norm is None and ctx.dropout_key is None:
            whole = self.attention.onto(x_BTD, norm, ctx, then=_factors(self.mlp_norm))
            if whole is not None:
                return whole
        x_BTD, seen_BTD = norm_with_residual(norm, x_BTD, wanted=self.spec.norm.wanted, place=ctx.place)
        mixed = self.attention(seen_BTD, ctx)
        branch_BTD = _normed(post_norm, mixed.out_BTD)
        return mixed._replace(out_BTD=_sum(x_BTD, dropout(branch_BTD, ctx.key(0), rate=self.spec.dropout), ctx))

    def _fed(self, x_BTD: jax.Array, ctx: Context) -> tuple[FeedForwardOutput, dict[str, AuxOutputs]]:
        """x + mlp(norm(x)), and what the parts of the feed-forward tell besides."""
        norm, post_norm = self.mlp_norm, self.mlp_post_norm
        is_alone = self.beside is None and post_norm is None and ctx.dropout_key is None
        if isinstance(self.mlp, Mlp) and is_alone:
            whole = self.mlp.onto(x_BTD, norm, ctx, then=self._then(ctx))
            if whole is not None:
                return whole, {"mlp": whole.side}
        x_BTD, seen_BTD = norm_with_residual(norm, x_BTD, wanted=self.spec.norm.wanted, place=ctx.place)
        fed = self.mlp(seen_BTD, ctx)
        sides = {"mlp": fed.side}
        if self.beside is not None:
            fed = self.beside(x_BTD, fed.out_BTD, ctx)
            sides["beside"] = fed.side
        branch_BTD = _normed(post_norm, fed.out_BTD)
        return FeedForwardOutput(_sum(x_BTD, dropout(branch_BTD, ctx.key(1), rate=self.spec.dropout), ctx), {}), sides

    def first_norm(self) -> Factors | None:
        """The norm that what stands before can make along; None where this layer would not take it."""
        takes = isinstance(self.attention, Attention) and self.attention_post_norm is None
        return _factors(self.attention_norm) if takes else None

    def _then(self, ctx: Context) -> Factors | None:
        """The next layer's first norm, where nothing changes the stream before it."""
        own, is_changed = _factors(self.mlp_norm), self.per_layer is not None or self.scale is not None
        if own is None or ctx.following is None or is_changed:
            return None
        return own._replace(scale_K=ctx.following)

    @property
    def name(self) -> str:
        return self.spec.name

    def empty_cache(self, room: CacheSpec, layers: int) -> Cache:
        return self.attention.empty_cache(room, layers)

    def _norm(self, make: ParamBuilder, is_there: bool) -> Norm | None:
        return self.spec.norm.build(self.spec.emb_dim, make) if is_there else None


def _factors(norm: Norm | None) -> Factors | None:
    return norm.factors if isinstance(norm, RMSNorm) else None


def _normed(norm: Norm | None, x_BTD: jax.Array) -> jax.Array:
    return x_BTD if norm is None else norm(x_BTD)


def _sum(x_BTD: jax.Array, branch_BTD: jax.Array, ctx: Context) -> jax.Array:
    """x + branch. On one device as rows, which is what products make and norms read: a product that adds to its result
    then sees that others read the stream too, where it takes a view of it for its own, to be copied and overwritten."""
    if ctx.sharder.mesh.size > 1:
        return x_BTD + branch_BTD
    rows = (-1, x_BTD.shape[-1])
    return (x_BTD.reshape(rows) + branch_BTD.reshape(rows)).reshape(x_BTD.shape)
