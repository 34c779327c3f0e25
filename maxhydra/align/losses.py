"""Preference losses: functions of the log-probabilities of pairs of answers. c is the chosen, r the rejected one.

s is an answer's log-probability and n its tokens, m = s / n its mean; h = s - s_ref is its log-ratio to the reference.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.dpo import WITHOUT_REFERENCE, DpoTask, PreferenceLoss

# A mean token probability this near to 1 counts as this near: its odds would be infinite.
NEAREST_TO_CERTAIN = -1e-6


@dataclasses.dataclass(frozen=True)
class Answers:
    """One side of the pairs, each [B]."""

    logprobs: jax.Array
    """s: summed over the tokens of the answer."""
    reference: jax.Array
    """s_ref; 0 where there is no reference."""
    tokens: jax.Array
    """n; 0 in a row that only fills up a batch."""

    @property
    def ratio(self) -> jax.Array:
        return self.logprobs - self.reference

    def per_token(self, total: jax.Array) -> jax.Array:
        return total / jnp.maximum(self.tokens, 1)


@dataclasses.dataclass(frozen=True)
class Pairs:
    chosen: Answers
    rejected: Answers

    @property
    def counts(self) -> jax.Array:
        """1 for each pair, 0 for a row that only fills up a batch."""
        return (self.chosen.tokens > 0).astype(jnp.float32)


def losses(pairs: Pairs, task: DpoTask) -> jax.Array:
    """The loss of each pair, [B]; 0 for a row that only fills up a batch."""
    return jnp.where(pairs.counts > 0, LOSSES[task.loss](pairs, task), 0)


def rewards(answers: Answers, task: DpoTask) -> jax.Array:
    """What the model is taken to think of answers: beta h, or beta m where there is no reference."""
    is_free = task.loss in WITHOUT_REFERENCE
    return task.beta * (answers.per_token(answers.logprobs) if is_free else answers.ratio)


def _sigmoid(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-log sigmoid(beta (h_c - h_r)); with label smoothing e, (1 - e) of it and e of that of the pair turned round."""
    return _smoothed(task.beta * (pairs.chosen.ratio - pairs.rejected.ratio), task.label_smoothing)


def _ipo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """(h_c / n_c - h_r / n_r - 1 / (2 beta))^2: the paper's, with log-ratios by token as its authors use it."""
    chosen, rejected = (answers.per_token(answers.ratio) for answers in (pairs.chosen, pairs.rejected))
    return jnp.square(chosen - rejected - 1 / (2 * task.beta))


def _orpo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-m_c - beta log sigmoid(log odds(m_c) - log odds(m_r)), log odds(m) = m - log(1 - exp(m)).

    The first term is the paper's likelihood of the chosen answer, each pair's by itself.
    """
    means = [answers.per_token(answers.logprobs) for answers in (pairs.chosen, pairs.rejected)]
    chosen, rejected = (mean - _log1mexp(jnp.minimum(mean, NEAREST_TO_CERTAIN)) for mean in means)
    return -means[0] - task.beta * jax.nn.log_sigmoid(chosen - rejected)


def _simpo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-log sigmoid(beta (m_c - m_r) - margin), label smoothing as in DPO."""
    chosen, rejected = (answers.per_token(answers.logprobs) for answers in (pairs.chosen, pairs.rejected))
    assert task.margin is not None
    return _smoothed(task.beta * (chosen - rejected) - task.margin, task.label_smoothing)


def _kto_pair(pairs: Pairs, task: DpoTask) -> jax.Array:
    """The mean of 1 - sigmoid(beta (h_c - z_r)) and 1 - sigmoid(beta (z_c - h_r)).

    z = max(0, mean h) over the pairs of a forward pass estimates the divergence from the reference, for each side from
    the other's answers; as in the paper, no gradient goes through it.
    """
    count = jnp.maximum(jnp.sum(pairs.counts), 1)

    def divergence(answers: Answers) -> jax.Array:
        return jax.lax.stop_gradient(jnp.maximum(jnp.sum(pairs.counts * answers.ratio) / count, 0))

    chosen = jax.nn.sigmoid(task.beta * (pairs.chosen.ratio - divergence(pairs.rejected)))
    rejected = jax.nn.sigmoid(task.beta * (divergence(pairs.chosen) - pairs.rejected.ratio))
    return 1 - (chosen + rejected) / 2


LOSSES: dict[PreferenceLoss, Callable[[Pairs, DpoTask], jax.Array]] = {
    PreferenceLoss.sigmoid: _sigmoid,
    PreferenceLoss.ipo: _ipo,
    PreferenceLoss.orpo: _orpo,
    PreferenceLoss.simpo: _simpo,
    PreferenceLoss.kto_pair: _kto_pair,
}


def _smoothed(logits: jax.Array, smoothing: float) -> jax.Array:
    return -(1 - smoothing) * jax.nn.log_sigmoid(logits) - smoothing * jax.nn.log_sigmoid(-logits)


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) of x < 0, precise at both ends."""
    is_small = x > -jnp.log(2.0)
    near = jnp.log(-jnp.expm1(jnp.where(is_small, x, -1)))
    far = jnp.log1p(-jnp.exp(jnp.where(is_small, -1, x)))
    return jnp.where(is_small, near, far)
