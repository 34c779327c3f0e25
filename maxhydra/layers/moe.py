"""Mixture of experts (Shazeer et al., 2017) as a feed-forward.

B batch, T tokens, D residual stream, E experts, K experts per token.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.layers.context import Context
from maxhydra.layers.experts import Experts, ExpertsSpec, RoutedTokens
from maxhydra.layers.interfaces import AuxOutputs, FeedForwardOutput
from maxhydra.layers.mlp import Mlp, MlpSpec
from maxhydra.layers.params import Dtypes, ParamBuilder, residual_scale
from maxhydra.layers.router import Router, RouterSpec


def expert_load(ids_BTK: jax.Array, is_real_BT: jax.Array | None, experts: int) -> jax.Array:
    """Number of tokens routed to each expert, float32 [E]; padding is not counted."""
    is_routed_BTE = jnp.any(ids_BTK[..., None] == jnp.arange(experts), axis=2)
    if is_real_BT is not None:
        is_routed_BTE = is_routed_BTE & is_real_BT[..., None]
    return jnp.sum(is_routed_BTE, axis=(0, 1), dtype=jnp.float32)


def balance_loss(load_E: jax.Array, shares_BTE: jax.Array, is_real_BT: jax.Array | None) -> jax.Array:
    """E * sum_e f_e p_e, f the fraction of the load and p the mean normalized score (Fedus et al., 2022; equation 4).

    1 for a uniform load. The gradient flows through p only: the load is a count.
    """
    real_BT1 = jnp.ones(shares_BTE.shape[:2]) if is_real_BT is None else is_real_BT
    real_BT1 = real_BT1.astype(jnp.float32)[..., None]
    mean_E = jnp.sum(shares_BTE * real_BT1, axis=(0, 1)) / jnp.maximum(jnp.sum(real_BT1), 1)
    return load_E.size * jnp.sum(load_E / jnp.maximum(jnp.sum(load_E), 1) * mean_E)


def update_router_bias(bias: jax.Array, load: jax.Array, *, rate: float) -> jax.Array:
    """The routing bias [..., E] after a step with this load: b + rate * sign(mean - load) (Wang et al., 2024)."""
    update = rate * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
    return bias + update.astype(bias.dtype)


@dataclasses.dataclass(frozen=True)
class MoeSpec:
    """A mixture of experts in one layer kind, resolved from the config."""

    router: RouterSpec
    experts: ExpertsSpec
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
            is_gated=True,
            activation=section.activation,
            has_bias=False,
            init_scale=model.init_scale,
            out_scale=residual_scale(model),
            dtypes=Dtypes.of(model.dtypes),
        )
        return cls(
            router=RouterSpec.of(model, section),
            experts=ExpertsSpec.of(model, section),
            shared=shared if shared.dim else None,
            shared_gate=section.shared.gate,
            capacity_factor=section.capacity_factor,
            balance_weight=section.balance_weight,
            dtypes=shared.dtypes,
        )

    def build(self, make: ParamBuilder) -> "Moe":
        return Moe(self, make)

    def forward_flops(self) -> float:
        """Forward FLOPs per token: router, its top_k experts, and the shared expert with its gate."""
        D, shared = self.experts.emb_dim, 0.0
        if self.shared is not None:
            shared = self.shared.forward_flops() + (0 if self.shared_gate is config.Gate.none else 2.0 * D)
        return 2.0 * D * self.router.experts + 2.0 * 3 * D * self.experts.dim * self.router.top_k + shared

    def idle_parameters(self) -> int:
        experts = self.experts
        biases = 2 * experts.dim + experts.emb_dim if experts.has_bias else 0
        return (experts.experts - self.router.top_k) * (3 * experts.emb_dim * experts.dim + biases)

    def capacity(self, tokens: int) -> int | None:
        """Slots of an expert for a sequence of this many tokens; None if no token is dropped."""
        if self.capacity_factor is None:
            return None
        even = tokens * self.router.top_k / self.router.experts
        return min(tokens, math.ceil(self.capacity_factor * even))

    def apply_aux_updates(self, new: Any, old: Any, aux: AuxOutputs) -> Any:
        """Weights after an optimizer step, with the routing bias updated by the load instead of a gradient."""
        rate = self.router.bias_rate
        if rate is None or "correction" not in new.get("router", {}):
            return new
        correction = update_router_bias(old["router"]["correction"], aux["load"], rate=rate)
        return {**new, "router": {**new["router"], "correction": correction}}


class Moe(nnx.Module):
    """The router's weighted sum of experts(x), plus an optional shared expert."""

    def __init__(self, spec: MoeSpec, make: ParamBuilder):
        self.spec = spec
        self.router = Router(spec.router, make.below("router"))
        self.experts = Experts(spec.experts, make.below("experts"))
        self.shared = None if spec.shared is None else Mlp(spec.shared, make.below("shared"))
        D, scale = spec.experts.emb_dim, spec.experts.init_scale
        is_gated = spec.shared is not None and spec.shared_gate is config.Gate.sigmoid
        self.shared_gate = (
            make.projection("shared_gate", (D,), (1,), ("embed", None), scale=scale) if is_gated else None
        )

    @jax.named_scope("moe")
    def __call__(
        self, x_BTD: jax.Array, ctx: Context, *, router_input_BTD: jax.Array | None = None
    ) -> FeedForwardOutput:
        """`router_input_BTD`: input of the router if it is not x."""
        is_real_BT = ctx.is_real_BT
        routing = self.router(x_BTD if router_input_BTD is None else router_input_BTD)
        routed = RoutedTokens(x_BTD, routing.ids_BTK, routing.weights_BTK)
        capacity = self.spec.capacity(x_BTD.shape[1]) if ctx.cache is None else None
        out_BTD = self.experts(routed, ctx, capacity=capacity, is_real_BT=is_real_BT).astype(self.spec.dtypes.compute)
        if self.shared is not None:
            out_BTD = out_BTD + self._shared(x_BTD, ctx)
        out_BTD = ctx.constrain(out_BTD, "act_batch", "act_length", "act_embed")
        load_E = expert_load(routing.ids_BTK, is_real_BT, self.spec.router.experts)
        aux = {"load": load_E}
        if self.spec.balance_weight:
            aux["loss"] = self.spec.balance_weight * balance_loss(load_E, routing.shares_BTE, is_real_BT)
        return FeedForwardOutput(checkpoint_name(out_BTD, "mlp_out"), aux)

    def _shared(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        assert self.shared is not None
        out_BTD = self.shared(x_BTD, ctx).out_BTD
        if self.shared_gate is None:
            return out_BTD
        gate_BT1 = jax.nn.sigmoid(self.shared_gate(x_BTD, ctx).astype(jnp.float32))
        return (gate_BT1 * out_BTD).astype(out_BTD.dtype)
