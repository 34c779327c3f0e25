"""The router of a mixture of experts: the experts of each token and their weights (Shazeer et al., 2017).

B batch, T tokens, D residual stream, E experts, K experts per token, G groups of experts.
"""

import dataclasses
import math
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from maxhydra.config.schema import model as config
from maxhydra.kernels.rms_norm.reference import unit_rms
from maxhydra.layers.context import Context
from maxhydra.layers.params import ParamBuilder

# Added to the sum of the scores of all experts before dividing by it.
TINY = 1e-20
# Pairs of scores up to which comparing them all is faster than sorting: 64 tokens with 256 experts.
MOST_PAIRS = 2**22
# Tokens from which a matmul with three times the columns pays; a few tokens are decoded faster by a matmul in float32.
MIN_TOKENS = 512
# Name of the router's decisions in rematerialization: mostly 4 bytes per token and expert, but many small kernels.
ROUTING = "routing"


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
        logits_BTE = checkpoint_name(self._logits(x_BTD), ROUTING)
        if self.bias is not None:
            logits_BTE = logits_BTE + self.bias[...].astype(jnp.float32)
        if self.spec.scores is config.RouterScores.softmax_of_chosen:
            ids_BTK = self._choose(logits_BTE, ctx)
            weights_BTK = jax.nn.softmax(scores_of(ids_BTK, logits_BTE))
            return Routing(ids_BTK, self._scale_weights(weights_BTK, ids_BTK), jax.nn.softmax(logits_BTE))
        is_independent = self.spec.scores is not config.RouterScores.softmax
        scores_BTE = SCORES[self.spec.scores](logits_BTE)
        ids_BTK = self._choose(scores_BTE, ctx)
        weights_BTK = scores_of(ids_BTK, scores_BTE)
        if self.spec.normalize:
            weights_BTK = _normalized(weights_BTK, self.spec.normalize_eps)
        shares_BTE = _normalized(scores_BTE, TINY) if is_independent else scores_BTE
        return Routing(ids_BTK, self._scale_weights(weights_BTK, ids_BTK), shares_BTE)

    def _logits(self, x_BTD: jax.Array) -> jax.Array:
        """x @ kernel in float32, of the norm of x if the router has its own (Gemma 4)."""
        kernel_DE = self.kernel[...].astype(jnp.float32)
        if self.scale is None:
            return wide_matmul(x_BTD, kernel_DE)
        assert self.spec.norm_eps is not None
        scale_D = self.scale[...].astype(jnp.float32) * self.spec.emb_dim**-0.5
        return wide_matmul(unit_rms(x_BTD.astype(jnp.float32), self.spec.norm_eps) * scale_D, kernel_DE)

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
        best = partial(self._best_experts, platform=place.platform)
        ids_BTK = checkpoint_name(place.manual(best, (tokens,), tokens)(scores_BTE), ROUTING)
        if ctx.expert_ids is None:
            return ids_BTK
        given_BTK = ctx.expert_ids[..., : self.spec.top_k].astype(ids_BTK.dtype)
        return jnp.where(given_BTK >= 0, given_BTK, ids_BTK)

    def _best_experts(self, scores_BTE: jax.Array, *, platform: str) -> jax.Array:
        if self.spec.groups > 1:
            scores_BTE = self._limit_to_groups(scores_BTE, platform)
        return best(scores_BTE, self.spec.top_k, platform)

    def _limit_to_groups(self, scores_BTE: jax.Array, platform: str) -> jax.Array:
        """The scores, with -inf for experts outside the best groups."""
        spec = self.spec
        by_group_BTGE = scores_BTE.reshape(*scores_BTE.shape[:2], spec.groups, -1)
        counted = 1 if spec.group_score is config.GroupScore.max else 2
        groups_BTG = jnp.sum(jax.lax.top_k(by_group_BTGE, counted)[0], axis=-1)
        best_BTg = best(groups_BTG, spec.top_groups, platform)
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


def best(scores: jax.Array, k: int, platform: str) -> jax.Array:
    """[..., k] indices of the largest scores, as jax.lax.top_k returns them.

    XLA sorts all scores on a GPU. Of few, comparing every pair is faster there, of many, k searches for the largest.
    """
    if scores.size * scores.shape[-1] <= MOST_PAIRS:
        return _best_by_rank(scores, k)
    return _best_in_turn(scores, k) if platform == "gpu" else jax.lax.top_k(scores, k)[1]


def _best_by_rank(scores: jax.Array, k: int) -> jax.Array:
    index = jnp.arange(scores.shape[-1], dtype=jnp.int32)
    scores = jnp.where(jnp.isnan(scores), jnp.inf, scores)
    own, other = scores[..., :, None], scores[..., None, :]
    is_before = (other > own) | ((other == own) & (index < index[:, None]))
    rank = jnp.sum(is_before, axis=-1, dtype=jnp.int32)
    return jnp.sum(jnp.where(rank[..., None, :] == jnp.arange(k)[:, None], index, 0), axis=-1, dtype=jnp.int32)


def _best_in_turn(scores: jax.Array, k: int) -> jax.Array:
    """The largest score, then the largest of the others, and so on."""
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(scores), jnp.inf, scores).astype(jnp.float32), jnp.int32)
    # Integers in the order of the floats; no float has the smallest integer, which marks those that were taken.
    keys = jnp.where(bits < 0, jnp.int32(-(2**31)) - bits, bits)
    index, chosen = jnp.arange(scores.shape[-1], dtype=jnp.int32), []
    for _ in range(k):
        chosen.append(jnp.argmax(keys, axis=-1).astype(jnp.int32))
        keys = jnp.where(index == chosen[-1][..., None], jnp.iinfo(jnp.int32).min, keys)
    return jnp.stack(chosen, axis=-1)


@jax.custom_vjp
def scores_of(ids_BTK: jax.Array, scores_BTE: jax.Array) -> jax.Array:
    """[B, T, K] the scores of these experts.

    Neither this nor the gradient reads or writes at an index: XLA would add the gradients with atomics.
    """
    is_chosen_BTKE = ids_BTK[..., None] == jnp.arange(scores_BTE.shape[-1])
    return jnp.sum(jnp.where(is_chosen_BTKE, scores_BTE[..., None, :], 0), axis=-1)


def _scores_of_forward(ids_BTK: jax.Array, scores_BTE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return scores_of(ids_BTK, scores_BTE), (ids_BTK, scores_BTE[:0])


def _scores_of_backward(saved: tuple[jax.Array, jax.Array], d_BTK: jax.Array) -> tuple[None, jax.Array]:
    ids_BTK, empty_scores = saved
    expert, d_scores_BTE = jnp.arange(empty_scores.shape[-1]), jnp.zeros((), d_BTK.dtype)
    for k in range(ids_BTK.shape[-1]):
        d_scores_BTE = d_scores_BTE + jnp.where(ids_BTK[..., k, None] == expert, d_BTK[..., k, None], 0)
    return None, d_scores_BTE


scores_of.defvjp(_scores_of_forward, _scores_of_backward)


def wide_matmul(x_BTD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """x @ kernel in float32, of which no operand is rounded."""
    if x_BTD.dtype == jnp.bfloat16 and math.prod(x_BTD.shape[:-1]) >= MIN_TOKENS:
        return _exact_matmul(x_BTD, kernel_DE)
    return jnp.einsum("BTD,DE->BTE", x_BTD.astype(jnp.float32), kernel_DE, precision=jax.lax.Precision.HIGHEST)


@jax.custom_vjp
def _exact_matmul(x_BTD: jax.Array, kernel_DE: jax.Array) -> jax.Array:
    """bfloat16 x @ float32 kernel, multiplied exactly and summed in float32.

    A float32 is the sum of three bfloat16, and tensor cores multiply these exactly: on an H200 ten times as fast as a
    matmul in float32.
    """
    parts_D3E = jnp.concatenate(bfloat16_parts(kernel_DE, 3), axis=1)
    return _sum_of_parts(jnp.einsum("BTD,DE->BTE", x_BTD, parts_D3E, preferred_element_type=jnp.float32))


def _exact_matmul_forward(x_BTD: jax.Array, kernel_DE: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _exact_matmul(x_BTD, kernel_DE), (x_BTD, kernel_DE)


def _exact_matmul_backward(saved: tuple[jax.Array, jax.Array], d_BTE: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradient of x, which is rounded to bfloat16, leaves out terms below 2^-16 of the largest."""
    x_BTD, kernel_DE = saved
    high, middle, low = bfloat16_parts(d_BTE, 3)
    kernel_high, kernel_middle = bfloat16_parts(kernel_DE, 2)
    d_parts = jnp.concatenate([high, high, middle], axis=-1)
    kernel_parts = jnp.concatenate([kernel_high, kernel_middle, kernel_high], axis=1)
    d_x_BTD = jnp.einsum("BTE,DE->BTD", d_parts, kernel_parts, preferred_element_type=x_BTD.dtype)
    d_parts = jnp.concatenate([high, middle, low], axis=-1)
    return d_x_BTD, _sum_of_parts(jnp.einsum("BTD,BTE->DE", x_BTD, d_parts, preferred_element_type=jnp.float32))


_exact_matmul.defvjp(_exact_matmul_forward, _exact_matmul_backward)


def bfloat16_parts(x: jax.Array, count: int) -> list[jax.Array]:
    """`count` bfloat16 arrays whose sum is x in float32 rounded to 8 * count bits, the largest first."""
    parts = []
    for _ in range(count):
        # XLA may drop a conversion to bfloat16 and back, which would leave nothing for the next part.
        rounded = jax.lax.reduce_precision(x, exponent_bits=8, mantissa_bits=7)
        parts.append(rounded.astype(jnp.bfloat16))
        x = x - rounded
    return parts


def _sum_of_parts(parts: jax.Array) -> jax.Array:
    """The sum of three blocks of columns, the smallest first."""
    high, middle, low = jnp.split(parts, 3, axis=-1)
    return high + (middle + low)


def _normalized(scores: jax.Array, eps: float) -> jax.Array:
    return scores / (jnp.sum(scores, axis=-1, keepdims=True) + eps)
