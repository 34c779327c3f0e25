"""The router of a mixture of experts (Shazeer et al., 2017), in float32 whatever the rest is computed in.

B batch, T tokens, D residual stream, E experts, K experts of a token, G groups of experts.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from maxhydra.config.schema import model as config
from maxhydra.kernels.rms_norm.reference import unit_square
from maxhydra.layers.params import ParamBuilder

# Added to a sum of scores that is divided by.
TINY = 1e-20


@dataclasses.dataclass(frozen=True)
class RouterSpec:
    """Sizes and mechanisms, resolved."""

    emb_dim: int
    experts: int
    top_k: int
    scores: config.RouterScores
    normalize: bool
    scale: float
    has_bias: bool
    norm_eps: float | None
    """Of the norm that the router has of its own; None: it has none."""
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
    """Where tokens go."""

    ids_BTK: jax.Array
    """The experts of each token."""
    weights_BTK: jax.Array
    """What each of them counts."""
    shares_BTE: jax.Array
    """The scores of all experts as shares of one."""


class Router(nnx.Module):
    """The experts with the best scores(x kernel)."""

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
        wide_BTD, kernel_DE = self._normed(x_BTD.astype(jnp.float32)), self.kernel[...].astype(jnp.float32)
        logits_BTE = jnp.einsum("BTD,DE->BTE", wide_BTD, kernel_DE, precision=jax.lax.Precision.HIGHEST)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias[...].astype(jnp.float32)
        if self.spec.scores is config.RouterScores.softmax_of_chosen:
            ids_BTK = self._choose(logits_BTE)
            weights_BTK = jax.nn.softmax(jnp.take_along_axis(logits_BTE, ids_BTK, axis=-1))
            return Routing(ids_BTK, self._scaled(weights_BTK, ids_BTK), jax.nn.softmax(logits_BTE))
        is_sigmoid = self.spec.scores is config.RouterScores.sigmoid
        scores_BTE = jax.nn.sigmoid(logits_BTE) if is_sigmoid else jax.nn.softmax(logits_BTE)
        ids_BTK = self._choose(scores_BTE)
        weights_BTK = jnp.take_along_axis(scores_BTE, ids_BTK, axis=-1)
        if self.spec.normalize:
            weights_BTK = _shares(weights_BTK)
        shares_BTE = _shares(scores_BTE) if is_sigmoid else scores_BTE
        return Routing(ids_BTK, self._scaled(weights_BTK, ids_BTK), shares_BTE)

    def _normed(self, wide_BTD: jax.Array) -> jax.Array:
        """Tokens as the router sees them."""
        if self.scale is None:
            return wide_BTD
        assert self.spec.norm_eps is not None
        scale_D = self.scale[...].astype(jnp.float32) * self.spec.emb_dim**-0.5
        return unit_square(wide_BTD, self.spec.norm_eps) * scale_D

    def _scaled(self, weights_BTK: jax.Array, ids_BTK: jax.Array) -> jax.Array:
        """What the chosen count."""
        weights_BTK = self.spec.scale * weights_BTK
        if self.expert_scale is None:
            return weights_BTK
        return weights_BTK * self.expert_scale[...].astype(jnp.float32)[ids_BTK]

    def _choose(self, scores_BTE: jax.Array) -> jax.Array:
        """The experts [B, T, K] with the best scores, the correction added, among those of the best groups."""
        scores_BTE = jax.lax.stop_gradient(scores_BTE)
        if self.correction is not None:
            scores_BTE = scores_BTE + jax.lax.stop_gradient(self.correction[...]).astype(jnp.float32)
        if self.spec.groups > 1:
            scores_BTE = self._limited(scores_BTE)
        return jax.lax.top_k(scores_BTE, self.spec.top_k)[1]

    def _limited(self, scores_BTE: jax.Array) -> jax.Array:
        """The scores, minus infinity in all but the best groups."""
        spec = self.spec
        by_group_BTGE = scores_BTE.reshape(*scores_BTE.shape[:2], spec.groups, -1)
        counted = 1 if spec.group_score is config.GroupScore.max else 2
        groups_BTG = jnp.sum(jax.lax.top_k(by_group_BTGE, counted)[0], axis=-1)
        best_BTg = jax.lax.top_k(groups_BTG, spec.top_groups)[1]
        is_best_BTG = jnp.any(best_BTg[..., None] == jnp.arange(spec.groups), axis=2)
        return jnp.where(is_best_BTG[..., None], by_group_BTGE, -jnp.inf).reshape(scores_BTE.shape)


def _shares(scores: jax.Array) -> jax.Array:
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + TINY)
