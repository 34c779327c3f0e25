"""Mixture of experts (Shazeer et al., 2017) as a feed-forward, or in parallel with a layer's MLP (Gemma 4, 2026).

B batch, T tokens, D residual stream, L its projection for the experts, E experts, K experts per token.
"""

import dataclasses
import math
import operator
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.layers.context import EXPERTS, Context
from maxhydra.layers.expert_mlp import ExpertsSpec
from maxhydra.layers.expert_rows import RoutedTokens, SharedExpert
from maxhydra.layers.experts import Experts
from maxhydra.layers.interfaces import AuxOutputs, FeedForwardOutput
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.norm import NormSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.router import Router, RouterSpec


def expert_load(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """Number of tokens routed to each expert, float32 [E]; padding is not counted."""
    # Not jnp.any, which XLA would compute in a separate kernel.
    is_routed_BTE = reduce(
        operator.or_, (ids_BTK[..., k, None] == jnp.arange(experts) for k in range(ids_BTK.shape[-1]))
    )
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
