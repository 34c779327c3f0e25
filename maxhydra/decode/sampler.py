"""Sampling of the next token: logit bias, penalties, temperature, top-k, top-p, min-p, in this order, then Gumbel-max.

All operations are exact and row-wise, so a row's token depends only on its own logits, parameters, seed and position.
Filters do not sort: the k-th largest logit and the smallest probability of the nucleus are found by 32 bisections over
float32 values, in a fraction of the time of a sort on every platform. Tokens that tie with the last accepted one are
accepted too. B rows, V vocabulary, A alternatives.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Maximum number of alternatives whose log-probabilities are reported.
MAX_LOGPROBS = 20
# A word of a mask that allows all of its 32 tokens.
ALL_TOKENS = 2**32 - 1


class SamplingArrays(NamedTuple):
    """Sampling parameters of each row; see `Request`."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    penalty_B: jax.Array
    """Repetition penalty."""
    frequency_B: jax.Array
    presence_B: jax.Array
    seed_B2: jax.Array
    """uint32, high half first: the data of a JAX PRNG key."""
    position_B: jax.Array
    """Position of the token to sample in its sequence, prompt included."""
    num_bias_B: jax.Array
    """Tokens with a logit bias."""


class SamplingFeatures(NamedTuple):
    """Features that at least one row needs; a program is compiled without the others."""

    random: bool
    """A row has a temperature above 0."""
    filters: bool
    """A row with a temperature uses top_k, top_p or min_p."""
    penalties: bool
    """A row has a repetition, frequency or presence penalty."""
    logprobs: bool
    """A row requests log-probabilities."""
    alternatives: bool = True
    """With log-probabilities: a row requests those of the most likely tokens too, which takes a top-k of the logits."""
    bias: bool = False
    """A row has a logit bias."""
    mask: bool = False
    """A row has a grammar, which masks tokens."""

    @property
    def is_greedy(self) -> bool:
        """True if the argmax of the logits is all that is needed."""
        return not (self.random or self.penalties or self.logprobs or self.bias or self.mask)

    def covers(self, other: "SamplingFeatures") -> bool:
        """Return True if a program with these features gives the same tokens to rows that need the other's."""
        return all(has_feature or not is_needed for has_feature, is_needed in zip(self, other, strict=True))


class LogitControls(NamedTuple):
    """What changes the logits of each row; None if no row needs it."""

    usage_BV: jax.Array | None = None
    """uint16: twice the number of occurrences in the completion, plus 1 for tokens of the prompt."""
    bias_BK: tuple[jax.Array, jax.Array] | None = None
    """Token ids and what is added to their logits; ids outside the vocabulary are padding."""
    mask_BW: jax.Array | None = None
    """uint32: one bit per token of the vocabulary; tokens without it are never sampled."""


class SampledTokens(NamedTuple):
    """Sampled tokens with log-probabilities under the unmodified model distribution (None if not requested)."""

    token_B: jax.Array
    """-1 if the row's logits are not finite."""
    logprob_B: jax.Array | None
    alternatives_BA: jax.Array | None
    alternative_logprobs_BA: jax.Array | None


def sample(
    logits_BV: jax.Array, controls: LogitControls, sampling: SamplingArrays, features: SamplingFeatures
) -> SampledTokens:
    """Sample one token per row."""
    raw_BV = logits_BV.astype(jnp.float32)
    scores_BV = _apply_controls(raw_BV, controls, sampling)
    token_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    if features.random:
        is_random_B = sampling.temperature_B > 0
        scaled_BV = scores_BV / jnp.where(is_random_B, sampling.temperature_B, 1)[:, None]
        if features.filters:
            scaled_BV = apply_filters(scaled_BV, sampling.top_k_B, sampling.top_p_B, sampling.min_p_B)
        token_B = jnp.where(is_random_B, _gumbel_max(scaled_BV, sampling.seed_B2, sampling.position_B), token_B)
    # The maximum of a row with a NaN is NaN.
    token_B = jnp.where(jnp.isfinite(jnp.max(raw_BV, axis=-1)), token_B, -1)
    if not features.logprobs:
        return SampledTokens(token_B, None, None, None)
    return score(raw_BV, token_B, alternatives=features.alternatives)


def score(logits_BV: jax.Array, token_B: jax.Array, *, alternatives: bool) -> SampledTokens:
    """Return tokens with their log-probabilities, and those of the most likely tokens if `alternatives`."""
    logprobs_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    if alternatives:
        top_BA, alternatives_BA = jax.lax.top_k(logprobs_BV, min(MAX_LOGPROBS, logits_BV.shape[1]))
    else:
        top_BA, alternatives_BA = logprobs_BV[:, :0], jnp.zeros((logits_BV.shape[0], 0), jnp.int32)
    logprob_B = jnp.take_along_axis(logprobs_BV, jnp.maximum(token_B, 0)[:, None], axis=1)[:, 0]
    return SampledTokens(token_B, logprob_B, alternatives_BA, top_BA)


def _apply_controls(logits_BV: jax.Array, controls: LogitControls, sampling: SamplingArrays) -> jax.Array:
    """Add the logit bias, apply the penalties, then the mask."""
    if controls.bias_BK is not None:
        ids_BK, bias_BK = controls.bias_BK
        logits_BV = logits_BV.at[jnp.arange(logits_BV.shape[0])[:, None], ids_BK].add(bias_BK, mode="drop")
    if (usage_BV := controls.usage_BV) is not None:
        logits_BV = apply_penalty(logits_BV, usage_BV > 0, sampling.penalty_B)
        counts_BV = (usage_BV >> 1).astype(jnp.float32)
        logits_BV -= sampling.frequency_B[:, None] * counts_BV
        logits_BV -= jnp.where(counts_BV > 0, sampling.presence_B[:, None], 0)
    if (mask_BW := controls.mask_BW) is not None:
        is_allowed_BV = (mask_BW[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1
        is_allowed_BV = is_allowed_BV.reshape(mask_BW.shape[0], -1)[:, : logits_BV.shape[1]]
        logits_BV = jnp.where(is_allowed_BV == 1, logits_BV, -jnp.inf)
    return logits_BV


def greedy_tokens(logit_B: jax.Array, token_B: jax.Array) -> SampledTokens:
    """Wrap the argmax tokens; their logit is not finite if any logit of the row is NaN."""
    return SampledTokens(jnp.where(jnp.isfinite(logit_B), token_B, -1), None, None, None)


def apply_penalty(logits_BV: jax.Array, seen_BV: jax.Array, penalty_B: jax.Array) -> jax.Array:
    """Divide positive logits of seen tokens by the penalty, and multiply negative ones by it."""
    penalty_B1 = penalty_B[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1), logits_BV)


def apply_filters(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """Set the logits of excluded tokens to -inf: top-k, then top-p and min-p on the renormalized rest."""
    V = logits_BV.shape[1]
    ordered_BV = _order_preserving_int(logits_BV)
    k_B1 = jnp.where(top_k_B <= 0, V, jnp.minimum(top_k_B, V))[:, None]
    kth_B1 = _largest_passing(lambda t_B1: jnp.sum(ordered_BV >= t_B1, axis=1, keepdims=True) >= k_B1, ordered_BV)
    logits_BV = jnp.where(ordered_BV >= kth_B1, logits_BV, -jnp.inf)

    probs_BV = jax.nn.softmax(logits_BV, axis=-1)
    ranks_BV = _order_preserving_int(probs_BV)
    p_B1 = top_p_B[:, None]

    def reaches_top_p(t_B1: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ranks_BV >= t_B1, probs_BV, 0), axis=1, keepdims=True) >= p_B1

    # The sum of all probabilities may round to just under 1, so top_p=1 is handled separately.
    threshold_B1 = jnp.where(p_B1 >= 1, jnp.iinfo(jnp.int32).min, _largest_passing(reaches_top_p, ranks_BV))
    is_allowed_BV = ranks_BV >= threshold_B1
    is_allowed_BV &= probs_BV >= min_p_B[:, None] * jnp.max(probs_BV, axis=1, keepdims=True)
    return jnp.where(is_allowed_BV, logits_BV, -jnp.inf)


def _order_preserving_int(x: jax.Array) -> jax.Array:
    """Map float32 to int32 monotonically: reinterpret the bits, and flip all but the sign of negative numbers."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _largest_passing(passes: Callable[[jax.Array], jax.Array], values_BV: jax.Array) -> jax.Array:
    """Return the largest int32 threshold [B, 1] that passes, by bisection; `passes` must be monotonic.

    If no threshold within the values passes, return the smallest value.
    """

    def bisect(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        is_passing = passes(middle)
        return jnp.where(is_passing, middle, low), jnp.where(is_passing, high, middle)

    low, high = jnp.min(values_BV, axis=1, keepdims=True), jnp.max(values_BV, axis=1, keepdims=True) + 1
    return jax.lax.fori_loop(0, 32, bisect, (low, high))[0]


def _gumbel_max(logits_BV: jax.Array, seed_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """Sample from each row's softmax: argmax after adding Gumbel noise keyed by the row's seed and position."""

    def noise(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32)

    return jnp.argmax(logits_BV + jax.vmap(noise)(seed_B2, position_B), axis=-1).astype(jnp.int32)
