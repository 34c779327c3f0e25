"""The router of a mixture of experts (Shazeer et al., 2017), always computed in float32.

B batch, T tokens, D residual stream, E experts, K experts per token, G groups of experts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.params import ParamBuilder

# Added to a sum of scores before dividing by it.
TINY = 1e-20


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """Sizes and options of the router, resolved from the config."""

    emb_dim: int
    experts: int
    top_k: int
    scores: config.RouterScores
    normalize: bool
    scale: float
    has_bias: bool
    norm_eps: float | None
    """Epsilon of the router's own input norm; None without one."""
    has_expert_scale: bool
    groups: int
    top_groups: int
    group_score: config.GroupScore
    bias_rate: float | None
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
            scale=router.scale,
            has_bias=router.bias,
            norm_eps=model.norm_eps if router.norm else None,
            has_expert_scale=router.expert_scale,
            groups=router.groups,
            top_groups=router.top_groups,
            group_score=router.group_score,
            bias_rate=router.bias_rate,
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
    """Top-k experts by score, a softmax or sigmoid of x @ kernel."""

    def __init__(self, spec: RouterSpec, make: ParamBuilder):
        self.spec = spec
        D, E = spec.emb_dim, spec.experts
        std = spec.init_scale * D**-0.5
        self.kernel = make.matrix((D,), (E,), ("embed", None), std=std, is_wide=True)
        self.bias = make.zeros((E,), (None,)) if spec.has_bias else None
        self.scale = make.ones((D,), ("norm",)) if spec.norm_eps is not None else None
        self.expert_scale = make.ones((E,), (None,)) if spec.has_expert_scale else None
        self.correction = make.zeros((E,), (None,)) if spec.bias_rate is not None else None

    @jax.named_scope("router")
    def __call__(self, x_BTD: jax.Array) -> Routing:
        x_BTD, kernel_DE = self._normalize(x_BTD.astype(jnp.float32)), self.kernel[...].astype(jnp.float32)
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, kernel_DE, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias[...].astype(jnp.float32)
        if self.spec.scores is config.RouterScores.softmax_of_chosen:
            ids_BTK = self._choose(logits_BTE)
            weights_BTK = jax.nn.softmax(jnp.take_along_axis(logits_BTE, ids_BTK, axis=-1))
            return Routing(ids_BTK, self._scale_weights(weights_BTK, ids_BTK), jax.nn.softmax(logits_BTE))
        is_sigmoid = self.spec.scores is config.RouterScores.sigmoid
        scores_BTE = jax.nn.sigmoid(logits_BTE) if is_sigmoid else jax.nn.softmax(logits_BTE)
        ids_BTK = self._choose(scores_BTE)
        weights_BTK = jnp.take_along_axis(scores_BTE, ids_BTK, axis=-1)
        if self.spec.normalize:
            weights_BTK = _normalized(weights_BTK)
        shares_BTE = _normalized(scores_BTE) if is_sigmoid else scores_BTE
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

    def _choose(self, scores_BTE: jax.Array) -> jax.Array:
        """[B, T, K] experts with the best biased scores, among those of the best groups."""
        scores_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.correction is not None:
            scores_BTE = scores_BTE + jax.lax.stop_gradient(self.correction[...]).astype(jnp.float32)
        if self.spec.groups > 1:
            scores_BTE = self._limit_to_groups(scores_BTE)
        return jax.lax.top_k(scores_BTE, self.spec.top_k)[1]

    def _limit_to_groups(self, scores_BTE: jax.Array) -> jax.Array:
        """The scores, with -inf for experts outside the best groups."""
        spec = self.spec
        by_group_BTGE = scores_BTE.reshape(*scores_BTE.shape[:2], spec.groups, -1)
        counted = 1 if spec.group_score is config.GroupScore.max else 2
        groups_BTG = jnp.sum(jax.lax.top_k(by_group_BTGE, counted)[0], axis=-1)
        best_BTg = jax.lax.top_k(groups_BTG, spec.top_groups)[1]
        is_best_BTG = jnp.any(best_BTg[..., None] == jnp.arange(spec.groups), axis=2)
        return jnp.where(is_best_BTG[..., None], by_group_BTGE, -jnp.inf).reshape(scores_BTE.shape)


def _normalized(scores: jax.Array) -> jax.Array:
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)
