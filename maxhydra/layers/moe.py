"""Mixture of experts (Shazeer et al., 2017) as a feed-forward, or in parallel with a layer's MLP (Gemma 4, 2026).

B batch, T tokens, D residual stream, L its projection for the experts, E experts, K experts per token, G groups of
experts.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.context import EXPERTS, Context
from maxhydra.layers.expert_rows import ExpertsSpec, RoutedTokens, SharedExpert
from maxhydra.layers.experts import Experts
from maxhydra.layers.interfaces import AuxOutputs, FeedForwardOutput
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale

# Added to the sum of the scores of all experts before dividing by it.
TINY = 1e-20
# Pairs of scores up to which comparing them all is faster than sorting: 64 tokens with 256 experts.
MOST_PAIRS = 2**22


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """Sizes and options of the router, resolved from the config."""

    emb_dim: int
    experts: int
    top_k: int
    scores: config.RouterScores
    normalize: bool
    normalize_eps: float
    scale: float
    has_bias: bool
    norm_eps: float | None
    """Epsilon of the router's own input norm; None without one."""
    has_expert_scale: bool
    groups: int
    top_groups: int
    group_score: config.GroupScore
    bias_rate: float | None
    table_rows: int | None
    """Token ids in the table of their experts; None: experts are chosen by score."""
    init_scale: float

    @classmethod
    def of(cls, model: config.Model, moe: config.Moe) -> "RouterSpec":
        router = moe.router
        assert moe.experts is not None
        return cls(
            emb_dim=model.emb_dim,
            experts=moe.experts,
            top_k=moe.top_k,
            scores=router.scores,
            normalize=router.normalize,
            normalize_eps=router.normalize_eps,
            scale=router.scale,
            has_bias=router.bias,
            norm_eps=model.norm_eps if router.norm else None,
            has_expert_scale=router.expert_scale,
            groups=router.groups,
            top_groups=router.top_groups,
            group_score=router.group_score,
            bias_rate=router.bias_rate,
            table_rows=model.vocab_size if router.by_token else None,
            init_scale=model.init_scale,
        )


class Routing(NamedTuple):
    """The router's decision."""

    ids_BTK: jax.Array
    """The experts of each token."""
    weights_BTK: jax.Array
    """Weight of each expert's output."""
    shares_BTE: jax.Array
    """Scores of all experts, normalized to sum to one."""


class Router(nnx.Module):
    """Top-k experts by score, a function of x @ kernel in float32, or those of the token's id."""

    def __init__(self, spec: RouterSpec, make: ParamBuilder):
        self.spec = spec
        D, E = spec.emb_dim, spec.experts
        std = spec.init_scale * D**-0.5
        self.kernel = make.matrix((D,), (E,), ("embed", None), std=std, is_wide=True)
        self.bias = make.zeros((E,), (None,)) if spec.has_bias else None
        self.scale = make.ones((D,), ("norm",)) if spec.norm_eps is not None else None
        self.expert_scale = make.ones((E,), (None,)) if spec.has_expert_scale else None
        self.correction = make.zeros((E,), (None,)) if spec.bias_rate is not None else None
        self.table = None if spec.table_rows is None else _expert_table(spec.table_rows, spec, make)

    @jax.named_scope("router")
    def __call__(self, x_BTD: jax.Array, ctx: Context) -> Routing:
        x_BTD, kernel_DE = self._normalize(x_BTD.astype(jnp.float32)), self.kernel[...].astype(jnp.float32)
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, kernel_DE, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias[...].astype(jnp.float32)
        if self.spec.scores is config.RouterScores.softmax_of_chosen:
            ids_BTK = self._choose(logits_BTE, ctx)
            weights_BTK = jax.nn.softmax(jnp.take_along_axis(logits_BTE, ids_BTK, axis=-1))
            return Routing(ids_BTK, self._scale_weights(weights_BTK, ids_BTK), jax.nn.softmax(logits_BTE))
        is_independent = self.spec.scores is not config.RouterScores.softmax
        scores_BTE = SCORES[self.spec.scores](logits_BTE)
        ids_BTK = self._choose(scores_BTE, ctx)
        weights_BTK = jnp.take_along_axis(scores_BTE, ids_BTK, axis=-1)
        if self.spec.normalize:
            weights_BTK = _normalized(weights_BTK, self.spec.normalize_eps)
        shares_BTE = _normalized(scores_BTE, TINY) if is_independent else scores_BTE
        return Routing(ids_BTK, self._scale_weights(weights_BTK, ids_BTK), shares_BTE)

    def _normalize(self, x_BTD: jax.Array) -> jax.Array:
        """The router's own norm of its input, if it has one (Gemma 4)."""
        if self.scale is None:
            return x_BTD
        assert self.spec.norm_eps is not None
        scale_D = self.scale[...].astype(jnp.float32) * self.spec.emb_dim**-0.5
        return unit_rms(x_BTD, self.spec.norm_eps) * scale_D

    def _scale_weights(self, weights_BTK: jax.Array, ids_BTK: jax.Array) -> jax.Array:
        """Weights of the chosen experts times the constant and the per-expert scale."""
        weights_BTK = self.spec.scale * weights_BTK
        if self.expert_scale is None:
            return weights_BTK
        return weights_BTK * self.expert_scale[...].astype(jnp.float32)[ids_BTK]

    def _choose(self, scores_BTE: jax.Array, ctx: Context) -> jax.Array:
        """[B, T, K] experts with the best biased scores, among those of the best groups, or those that ctx gives.

        Every device sorts the scores of its tokens; the compiler would gather those of all devices.
        """
        if self.table is not None:
            assert ctx.tokens is not None
            return jnp.round(jax.lax.stop_gradient(self.table[...])[ctx.tokens]).astype(jnp.int32)
        scores_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.correction is not None:
            scores_BTE = scores_BTE + jax.lax.stop_gradient(self.correction[...]).astype(jnp.float32)
        place = ctx.place.dividing(batch=scores_BTE.shape[0], length=scores_BTE.shape[1])
        tokens = place.spec("batch", "length", None)
        ids_BTK = place.manual(self._best_experts, (tokens,), tokens)(scores_BTE)
        if ctx.expert_ids is None:
            return ids_BTK
        given_BTK = ctx.expert_ids[..., : self.spec.top_k].astype(ids_BTK.dtype)
        return jnp.where(given_BTK >= 0, given_BTK, ids_BTK)

    def _best_experts(self, scores_BTE: jax.Array) -> jax.Array:
        if self.spec.groups > 1:
            scores_BTE = self._limit_to_groups(scores_BTE)
        return _best(scores_BTE, self.spec.top_k)

    def _limit_to_groups(self, scores_BTE: jax.Array) -> jax.Array:
        """The scores, with -inf for experts outside the best groups."""
        spec = self.spec
        by_group_BTGE = scores_BTE.reshape(*scores_BTE.shape[:2], spec.groups, -1)
        counted = 1 if spec.group_score is config.GroupScore.max else 2
        groups_BTG = jnp.sum(jax.lax.top_k(by_group_BTGE, counted)[0], axis=-1)
        best_BTg = _best(groups_BTG, spec.top_groups)
        is_best_BTG = jnp.any(best_BTg[..., None] == jnp.arange(spec.groups), axis=2)
        return jnp.where(is_best_BTG[..., None], by_group_BTGE, -jnp.inf).reshape(scores_BTE.shape)


def _sqrt_softplus(logits: jax.Array) -> jax.Array:
    # The slope of the root is infinite at zero, where softplus underflows.
    return jnp.sqrt(jnp.maximum(jax.nn.softplus(logits), TINY))


SCORES = {
    config.RouterScores.softmax: jax.nn.softmax,
    config.RouterScores.sigmoid: jax.nn.sigmoid,
    config.RouterScores.sqrt_softplus: _sqrt_softplus,
}


def _expert_table(rows: int, spec: RouterSpec, make: ParamBuilder) -> nnx.Param:
    """[V, K] experts of each token id: distinct ones, from a random expert on at equal distances.

    Float32, whose integers are exact: optimizers and checkpoints then treat the table like other weights.
    """

    def sample(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        first = jax.random.randint(key, (*shape[:-1], 1), 0, spec.experts)
        return (first + np.arange(spec.top_k) * (spec.experts // spec.top_k)) % spec.experts

    table = make.random((rows, spec.top_k), ("positions", None), sample, dtype=jnp.dtype(jnp.float32))
    table.set_metadata(is_wide=True)
    return table


def _best(scores: jax.Array, k: int) -> jax.Array:
    """[..., k] indices of the largest scores, as jax.lax.top_k returns them.

    Of few scores every pair is compared, which XLA compiles for a GPU to fewer and faster kernels than a sort.
    """
    if scores.size * scores.shape[-1] > MOST_PAIRS:
        return jax.lax.top_k(scores, k)[1]
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    own, other = scores[..., :, None], scores[..., None, :]
    is_before = (other > own) | ((other == own) & (index < index[:, None]))
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[..., None, :] == jnp.arange(k)[:, None], index, 0), axis=-1, dtype=jnp.int32)


def _normalized(scores: jax.Array, eps: float) -> jax.Array:
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + eps)


def expert_load(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """Number of tokens routed to each expert, float32 [E]; padding is not counted."""
    is_routed_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2)
    if is_real_BT is not None:
        is_routed_BTE = is_routed_BTE & is_real_BT[..., None]
    return jnp.sum(is_routed_BTE, axis=(0, 1), dtype=jnp.float32)


def share_sums(shares_BTE: jax.Array, is_real_BT: jax.Array | None) -> AuxOutputs:
    """Sum of the normalized scores of each expert over the tokens, and the number of tokens; padding is not counted."""
    real_BT1 = jnp.ones(shares_BTE.shape[:2]) if is_real_BT is None else is_real_BT
    real_BT1 = real_BT1.astype(jnp.float32)[..., None]
    return {"shares": jnp.sum(shares_BTE * real_BT1, axis=(0, 1)), "tokens": jnp.sum(real_BT1)}


def update_router_bias(bias: jax.Array, load: jax.Array, *, rate: float) -> jax.Array:
    """The routing bias [..., E] after a step with this load: b + rate * sign(mean - load) (Wang et al., 2024)."""
    update = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return bias + update.astype(bias.dtype)


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in one layer kind, resolved from the config."""

    router: RouterSpec
    experts: ExpertsSpec
    is_latent: bool
    """Whether the routed experts work on a projection of the residual stream."""
    shared: MlpSpec | None
    shared_gate: config.Gate
    capacity_factor: float | None
    balance_weight: float
    dtypes: Dtypes

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "MoeSpec":
        section = kind.moe
        shared = MlpSpec(
            emb_dim=model.emb_dim,
            dim=section.shared.dim or 0,
            is_gated=section.kind is config.MlpKind.gated,
            activation=section.activation,
            has_bias=False,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
            limit=section.limit,
        )
        return cls(
            router=RouterSpec.of(model, section),
            experts=ExpertsSpec.of(model, section),
            is_latent=section.latent_dim is not None,
            shared=shared if shared.dim else None,
            shared_gate=section.shared.gate,
            capacity_factor=section.capacity_factor,
            balance_weight=section.balance_weight,
            dtypes=shared.dtypes,
        )

    def build(self, make: ParamBuilder) -> "Moe":
        return Moe(self, make)

    def forward_flops(self) -> float:
        """Forward FLOPs per token: router, its top_k experts with their projections, shared expert with its gate."""
        D, L, shared = self.router.emb_dim, self.experts.emb_dim, 0.0
        if self.shared is not None:
            shared = self.shared.forward_flops() + (0 if self.shared_gate is config.Gate.none else 2.0 * D)
        routed = 2.0 * self.experts.matrices * L * self.experts.dim * self.router.top_k
        return 2.0 * D * self.router.experts + routed + (4.0 * D * L if self.is_latent else 0.0) + shared

    def idle_parameters(self) -> int:
        experts = self.experts
        biases = (experts.matrices - 1) * experts.dim + experts.emb_dim if experts.has_bias else 0
        return (experts.experts - self.router.top_k) * (experts.matrices * experts.emb_dim * experts.dim + biases)

    def capacity(self, tokens: int) -> int | None:
        """Slots of an expert for a sequence of this many tokens; None if no token is dropped."""
        if self.capacity_factor is None:
            return None
        even = tokens * self.router.top_k / self.router.experts
        return min(tokens, math.ceil(self.capacity_factor * even))

    def apply_aux_updates(self, new: Any, old: Any, aux: AuxOutputs) -> Any:
        """Weights after an optimizer step, with the routing bias updated by the load instead of a gradient."""
        if "table" in new.get("router", {}):
            # It has no gradient, but weight decay would change it.
            new = {**new, "router": {**new["router"], "table": old["router"]["table"]}}
        rate = self.router.bias_rate
        if rate is None or "correction" not in new.get("router", {}):
            return new
        correction = update_router_bias(old["router"]["correction"], aux["load"], rate=rate)
        return {**new, "router": {**new["router"], "correction": correction}}


class Moe(nnx.Module):
    """The router's weighted sum of experts(x), or up(sum of experts(down(x))), plus an optional shared expert."""

    def __init__(self, spec: MoeSpec, make: ParamBuilder):
        self.spec = spec
        self.router = Router(spec.router, make.below("router"))
        self.experts = Experts(spec.experts, make.below("experts"))
        self.shared = None if spec.shared is None else Mlp(spec.shared, make.below("shared"))
        D, L, scale = spec.router.emb_dim, spec.experts.emb_dim, spec.experts.init_scale
        is_gated = spec.shared is not None and spec.shared_gate is config.Gate.sigmoid
        project = partial(make.projection, scale=scale)
        self.shared_gate = project("shared_gate", (D,), (1,), ("embed", None)) if is_gated else None
        self.latent_down = project("latent_down", (D,), (L,), ("embed", None)) if spec.is_latent else None
        self.latent_up = project("latent_up", (L,), (D,), (None, "embed")) if spec.is_latent else None

    @jax.named_scope("moe")
    def __call__(
        self, x_BTD: jax.Array, ctx: Context, *, router_input_BTD: jax.Array | None = None
    ) -> FeedForwardOutput:
        """`router_input_BTD`: input of the router if it is not x."""
        is_real_BT = ctx.is_real_BT
        routing = self.router(x_BTD if router_input_BTD is None else router_input_BTD, ctx)
        # Without a latent width L is D.
        x_BTL = x_BTD if self.latent_down is None else self.latent_down(x_BTD, ctx)
        routed = RoutedTokens(x_BTL, routing.ids_BTK, routing.weights_BTK)
        capacity = self.spec.capacity(x_BTD.shape[1]) if ctx.cache is None else None
        adds_shared = self.latent_up is None and self.experts.adds_shared(ctx, capacity=capacity)
        shared = self._shared_expert(x_BTD, ctx) if adds_shared else None
        out_BTL, dropped = self.experts(routed, ctx, capacity=capacity, is_real_BT=is_real_BT, shared=shared)
        out_BTL = out_BTL.astype(self.spec.dtypes.compute)
        out_BTD = out_BTL if self.latent_up is None else ctx.to_stream(self.latent_up(out_BTL, ctx))
        if self.shared is not None and shared is None:
            out_BTD = out_BTD + self._shared(x_BTD, ctx)
        out_BTD = ctx.constrain_stream(out_BTD)
        load_E = expert_load(routing.ids_BTK, is_real_BT, self.spec.router.experts)
        aux = {"load": load_E} if dropped is None else {"load": load_E, "dropped": dropped}
        if self.spec.balance_weight:
            aux |= share_sums(self.spec.balance_weight * routing.shares_BTE, is_real_BT)
        if ctx.records_experts:
            aux[EXPERTS] = routing.ids_BTK
        return FeedForwardOutput(checkpoint_name(out_BTD, "mlp_out"), aux)

    def _shared(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        assert self.shared is not None
        out_BTD, gate_BT1 = self.shared(x_BTD, ctx).out_BTD, self._gate(x_BTD, ctx)
        return out_BTD if gate_BT1 is None else (gate_BT1 * out_BTD).astype(out_BTD.dtype)

    def _shared_expert(self, x_BTD: jax.Array, ctx: Context) -> SharedExpert | None:
        """The shared expert as the experts add it; None if there is none or it is more than three matmuls."""
        kernels = None if self.shared is None else self.shared.plain_kernels
        return None if kernels is None else SharedExpert(*kernels, self._gate(x_BTD, ctx))

    def _gate(self, x_BTD: jax.Array, ctx: Context) -> jax.Array | None:
        """Factor of the shared expert's output; None without one."""
        if self.shared_gate is None:
            return None
        return jax.nn.sigmoid(self.shared_gate(x_BTD, ctx).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class ParallelMoeSpec:
    """The mixture of experts and the norms of both branches, resolved from the config."""

    moe: MoeSpec
    norm: NormSpec

    @classmethod
    def of(cls, model: config.Model, kind: config.Kind) -> "ParallelMoeSpec | None":
        """None for layer kinds without a parallel MoE."""
        return cls(MoeSpec.of(model, kind), NormSpec.of(model)) if kind.parallel_moe is config.ParallelMoe.moe else None


class ParallelMoe(nnx.Module):
    """first_norm(mlp_out) + out_norm(moe(norm(x))); the router's input is x itself, without the norm."""

    def __init__(self, spec: ParallelMoeSpec, make: ParamBuilder):
        D = spec.moe.router.emb_dim
        self.first_norm = spec.norm.build(D, make)
        self.norm = spec.norm.build(D, make)
        self.moe = Moe(spec.moe, make.below("moe"))
        self.out_norm = spec.norm.build(D, make)

    def __call__(self, x_BTD: jax.Array, mlp_out_BTD: jax.Array, ctx: Context) -> FeedForwardOutput:
        moe = self.moe(self.norm(x_BTD), ctx, router_input_BTD=x_BTD)
        return FeedForwardOutput(self.first_norm(mlp_out_BTD) + self.out_norm(moe.out_BTD), moe.aux)
