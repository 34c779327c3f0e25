"""The next token of each row: penalty, temperature, top-k, top-p, min-p, in this order, then a draw by the row's seed.

Everything here is exact and row by row, so that a row's token depends on its own logits, settings and position alone.
Filters need no sort: the k-th largest logit and the smallest probability of the nucleus are found by halving an
interval of float32 numbers, 32 times, which takes a fraction of the time on every platform. Tokens that tie with the
last one kept are kept too. B rows, V vocabulary, A alternatives.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# Alternatives whose log-probabilities are reported at most.
ALTERNATIVES = 20


class Settings(NamedTuple):
    """How each row is drawn, as `Request` says."""

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    penalty_B: jax.Array
    seed_B2: jax.Array
    """uint32, high half first: the data of a jax key."""
    position_B: jax.Array
    """Place of the token to be drawn in its sequence, prompt included."""


@dataclasses.dataclass(frozen=True)
class SamplingFeatures:
    """What any of the rows needs; a program is compiled without the rest."""

    draws: bool
    """A row has a temperature."""
    filters: bool
    """A row that draws has top_k, top_p or min_p."""
    penalises: bool
    reports: bool
    """A row asks for log-probabilities."""

    @property
    def takes_likeliest(self) -> bool:
        """Whether of all logits the largest is enough to know."""
        return not (self.draws or self.penalises or self.reports)

    def holds(self, other: "SamplingFeatures") -> bool:
        """Whether a program with these steps gives rows that need the other's the same tokens."""
        return all(
            mine or not theirs
            for mine, theirs in zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        )


class SampledTokens(NamedTuple):
    """The tokens, and under the model's own distribution their log-probabilities and the likeliest tokens' (None where
    nobody asks)."""

    token_B: jax.Array
    """-1 where the logits are not numbers."""
    logprob_B: jax.Array | None
    alternatives_BA: jax.Array | None
    alternative_logprobs_BA: jax.Array | None


def choose(
    logits_BV: jax.Array, seen_BV: jax.Array | None, settings: Settings, steps: SamplingFeatures
) -> SampledTokens:
    """One token for every row. `seen_BV`: tokens of the prompt and the answer so far, if steps.penalises."""
    raw_BV = logits_BV.astype(jnp.float32)
    scores_BV = raw_BV
    if steps.penalises:
        assert seen_BV is not None
        scores_BV = penalised(scores_BV, seen_BV, settings.penalty_B)
    token_B = jnp.argmax(scores_BV, axis=-1).astype(jnp.int32)
    if steps.draws:
        is_drawn_B = settings.temperature_B > 0
        drawn_BV = scores_BV / jnp.where(is_drawn_B, settings.temperature_B, 1)[:, None]
        if steps.filters:
            drawn_BV = filtered(drawn_BV, settings.top_k_B, settings.top_p_B, settings.min_p_B)
        token_B = jnp.where(is_drawn_B, _drawn(drawn_BV, settings.seed_B2, settings.position_B), token_B)
    # A row with a NaN anywhere has a NaN for its largest logit.
    token_B = jnp.where(jnp.isfinite(jnp.max(raw_BV, axis=-1)), token_B, -1)
    if not steps.reports:
        return SampledTokens(token_B, None, None, None)
    logprobs_BV = jax.nn.log_softmax(raw_BV, axis=-1)
    best_BA, alternatives_BA = jax.lax.top_k(logprobs_BV, min(ALTERNATIVES, raw_BV.shape[1]))
    own_B = jnp.take_along_axis(logprobs_BV, jnp.maximum(token_B, 0)[:, None], axis=1)[:, 0]
    return SampledTokens(token_B, own_B, alternatives_BA, best_BA)


def likeliest(logit_B: jax.Array, token_B: jax.Array) -> SampledTokens:
    """The tokens with the largest logit, which is not finite where any logit is no number."""
    return SampledTokens(jnp.where(jnp.isfinite(logit_B), token_B, -1), None, None, None)


def penalised(logits_BV: jax.Array, seen_BV: jax.Array, penalty_B: jax.Array) -> jax.Array:
    """Logits of tokens seen before divided by the penalty where positive, multiplied where negative."""
    penalty_B1 = penalty_B[:, None]
    return jnp.where(seen_BV, jnp.where(logits_BV < 0, logits_BV * penalty_B1, logits_BV / penalty_B1), logits_BV)


def filtered(logits_BV: jax.Array, top_k_B: jax.Array, top_p_B: jax.Array, min_p_B: jax.Array) -> jax.Array:
    """Logits with -inf for tokens that may not be drawn. Each filter sees what the one before it left."""
    V = logits_BV.shape[1]
    ordered_BV = _ordered(logits_BV)
    k_B1 = jnp.where(top_k_B <= 0, V, jnp.minimum(top_k_B, V))[:, None]
    kth_B1 = _largest_passing(lambda t_B1: jnp.sum(ordered_BV >= t_B1, axis=1, keepdims=True) >= k_B1, ordered_BV)
    logits_BV = jnp.where(ordered_BV >= kth_B1, logits_BV, -jnp.inf)

    shares_BV = jax.nn.softmax(logits_BV, axis=-1)
    ranks_BV = _ordered(shares_BV)
    p_B1 = top_p_B[:, None]

    def reaches(t_B1: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(ranks_BV >= t_B1, shares_BV, 0), axis=1, keepdims=True) >= p_B1

    # Sums of all shares may round to just under 1, so that top_p=1 is a case of its own.
    least_B1 = jnp.where(p_B1 >= 1, jnp.iinfo(jnp.int32).min, _largest_passing(reaches, ranks_BV))
    is_kept_BV = ranks_BV >= least_B1
    is_kept_BV &= shares_BV >= min_p_B[:, None] * jnp.max(shares_BV, axis=1, keepdims=True)
    return jnp.where(is_kept_BV, logits_BV, -jnp.inf)


def _ordered(x: jax.Array) -> jax.Array:
    """float32 as int32 in the same order: the bits, of which a negative number's are flipped but for the sign."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return bits ^ ((bits >> 31) & jnp.int32(0x7FFFFFFF))


def _largest_passing(passes: Callable[[jax.Array], jax.Array], values_BV: jax.Array) -> jax.Array:
    """The largest int32 threshold [B, 1] that passes, given that any below one that passes does too.

    If none within the values passes, the smallest of them.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)
        is_passed = passes(middle)
        return jnp.where(is_passed, middle, low), jnp.where(is_passed, high, middle)

    low, high = jnp.min(values_BV, axis=1, keepdims=True), jnp.max(values_BV, axis=1, keepdims=True) + 1
    return jax.lax.fori_loop(0, 32, halve, (low, high))[0]


def _drawn(logits_BV: jax.Array, seed_B2: jax.Array, position_B: jax.Array) -> jax.Array:
    """A token of each row's softmax: the largest logit after adding Gumbel noise of the row's seed and position."""

    def noise(seed_2: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(seed_2, impl="threefry2x32"), position)
        return jax.random.gumbel(key, logits_BV.shape[1:], jnp.float32)

    return jnp.argmax(logits_BV + jax.vmap(noise)(seed_B2, position_B), axis=-1).astype(jnp.int32)
