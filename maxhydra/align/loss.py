"""Preference losses of a batch of completion pairs, chosen (c) and rejected (r).

s is the log-prob of a completion, n its number of tokens, m = s / n; h = s - s_ref is its log-ratio to the reference.

With loss=kto a pair is a labeled completion (c), and the completion of another prompt (r), which estimates the KL.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.training import WITHOUT_REFERENCE, DpoTask, PreferenceLoss, Reference
from maxhydra.layers.context import IMAGES
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder
from maxhydra.train import Scorer
from maxhydra.train.loss import ROW_VALUES, Batch, LossFn, ScoredTokens, Sums, Tree, add_aux_losses, sampler_error

# Upper bound of the mean token log-prob: at probability 1 the odds would be infinite.
MAX_MEAN_LOGPROB = -1e-6


@dataclasses.dataclass(frozen=True)
class Completions:
    """The chosen or the rejected completions of the pairs, each array [B]."""

    logprobs: jax.Array
    """s: summed over the tokens of the completion."""
    reference: jax.Array
    """s_ref; 0 without a reference."""
    tokens: jax.Array
    """n; 0 in a padding row."""

    @property
    def ratio(self) -> jax.Array:
        return self.logprobs - self.reference

    def per_token(self, total: jax.Array) -> jax.Array:
        return total / jnp.maximum(self.tokens, 1)


@dataclasses.dataclass(frozen=True)
class Pairs:
    chosen: Completions
    rejected: Completions
    labels: jax.Array | None = None
    """kto: [B], 1 for a desirable completion, 0 for another."""

    @property
    def counts(self) -> jax.Array:
        """1 for each pair, 0 for a padding row."""
        return (self.chosen.tokens > 0).astype(jnp.float32)


def losses(pairs: Pairs, task: DpoTask) -> jax.Array:
    """The loss of each pair, [B]; 0 for a padding row. nll_weight adds a multiple of -m_c."""
    likelihood = pairs.chosen.per_token(pairs.chosen.logprobs)
    return jnp.where(pairs.counts > 0, LOSSES[task.loss](pairs, task) - task.nll_weight * likelihood, 0)


def rewards(completions: Completions, task: DpoTask) -> jax.Array:
    """Implicit rewards of completions: beta h, beta s for cpo, beta m for the other losses without a reference."""
    is_per_token = task.loss in WITHOUT_REFERENCE and task.loss is not PreferenceLoss.cpo
    return task.beta * (completions.per_token(completions.logprobs) if is_per_token else completions.ratio)


def _sigmoid(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-log sigmoid(beta (h_c - h_r)); with label smoothing e, mixed with weight e with that of the swapped pair."""
    return _smoothed(task.beta * (pairs.chosen.ratio - pairs.rejected.ratio), task.label_smoothing)


def _ipo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """(h_c / n_c - h_r / n_r - 1 / (2 beta))^2: the paper's loss with per-token log-ratios, as in its authors' code."""
    chosen, rejected = (completions.per_token(completions.ratio) for completions in (pairs.chosen, pairs.rejected))
    return jnp.square(chosen - rejected - 1 / (2 * task.beta))


def _orpo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-m_c - beta log sigmoid(log odds(m_c) - log odds(m_r)), log odds(m) = m - log(1 - exp(m)).

    The first term is the paper's NLL of the chosen completion, averaged over the tokens of each pair separately.
    """
    means = [completions.per_token(completions.logprobs) for completions in (pairs.chosen, pairs.rejected)]
    chosen, rejected = (mean - _log1mexp(jnp.minimum(mean, MAX_MEAN_LOGPROB)) for mean in means)
    return -means[0] - task.beta * jax.nn.log_sigmoid(chosen - rejected)


def _simpo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-log sigmoid(beta (m_c - m_r) - margin), label smoothing as in DPO."""
    chosen, rejected = (completions.per_token(completions.logprobs) for completions in (pairs.chosen, pairs.rejected))
    assert task.margin is not None
    return _smoothed(task.beta * (chosen - rejected) - task.margin, task.label_smoothing)


def _cpo(pairs: Pairs, task: DpoTask) -> jax.Array:
    """-log sigmoid(beta (s_c - s_r)), label smoothing as in DPO; the paper adds -m_c (nll_weight=1)."""
    return _smoothed(task.beta * (pairs.chosen.logprobs - pairs.rejected.logprobs), task.label_smoothing)


def _kto_pair(pairs: Pairs, task: DpoTask) -> jax.Array:
    """The mean of 1 - sigmoid(beta (h_c - z_r)) and 1 - sigmoid(beta (z_c - h_r)).

    z estimates the KL to the reference, for chosen completions from the rejected ones and vice versa.
    """
    chosen = jax.nn.sigmoid(task.beta * (pairs.chosen.ratio - _kl(pairs, pairs.rejected)))
    rejected = jax.nn.sigmoid(task.beta * (_kl(pairs, pairs.chosen) - pairs.rejected.ratio))
    return 1 - (chosen + rejected) / 2


def _kto(pairs: Pairs, task: DpoTask) -> jax.Array:
    """1 - sigmoid(beta (h_c - z)), for an undesirable completion 1 - sigmoid(beta (z - h_c)); times its weight."""
    assert pairs.labels is not None
    is_desirable = pairs.labels > 0
    weights = jnp.where(is_desirable, task.desirable_weight, task.undesirable_weight)
    distance = task.beta * (pairs.chosen.ratio - _kl(pairs, pairs.rejected))
    return weights * (1 - jax.nn.sigmoid(jnp.where(is_desirable, distance, -distance)))


def _kl(pairs: Pairs, completions: Completions) -> jax.Array:
    """max(0, mean h) over a forward pass, an estimate of the KL to the reference; as in the paper, without gradient."""
    count = jnp.maximum(jnp.sum(pairs.counts), 1)
    return jax.lax.stop_gradient(jnp.maximum(jnp.sum(pairs.counts * completions.ratio) / count, 0))


LOSSES: dict[PreferenceLoss, Callable[[Pairs, DpoTask], jax.Array]] = {
    PreferenceLoss.sigmoid: _sigmoid,
    PreferenceLoss.ipo: _ipo,
    PreferenceLoss.orpo: _orpo,
    PreferenceLoss.simpo: _simpo,
    PreferenceLoss.cpo: _cpo,
    PreferenceLoss.kto_pair: _kto_pair,
    PreferenceLoss.kto: _kto,
}


def _smoothed(logits: jax.Array, smoothing: float) -> jax.Array:
    return -(1 - smoothing) * jax.nn.log_sigmoid(logits) - smoothing * jax.nn.log_sigmoid(-logits)


def _log1mexp(x: jax.Array) -> jax.Array:
    """log(1 - exp(x)) for x < 0, accurate at both ends."""
    is_small = x > -jnp.log(2.0)
    near = jnp.log(-jnp.expm1(jnp.where(is_small, x, -1)))
    far = jnp.log1p(-jnp.exp(jnp.where(is_small, -1, x)))
    return jnp.where(is_small, near, far)


# Prefixes of the columns of a pair.
ROLES = ("chosen", "rejected")
# Column of the log-probs of the engine that sampled a completion, in online DPO.
SAMPLED = "sampled_logprobs"


@dataclasses.dataclass(frozen=True)
class PairScorer:
    """Log-probs of the completions of a batch of pairs."""

    model: ModelDef
    sharder: Sharder
    chunk: int

    def __call__(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> jax.Array:
        """[B, 2]: summed log-probs of the chosen and the rejected completion, in one forward pass over both."""
        return self.score(weights, batch, key, is_adapted=is_adapted).logprobs

    def score(self, weights: Tree, batch: Batch, key: jax.Array | None, *, is_adapted: bool) -> ScoredTokens:
        """Like calling the scorer, and also returns the aux outputs of the layers."""
        rows = {name: interleave(batch, name) for name in ("tokens", "targets", "positions", "weights")}
        rows |= {name: batch[name] for name in (IMAGES,) if name in batch}
        tokens = Scorer(self.model, self.sharder, self.chunk).score(weights, rows, key, is_adapted=is_adapted)
        if f"{ROLES[0]}_{SAMPLED}" in batch:
            error = sampler_error(tokens.logprobs, interleave(batch, SAMPLED), rows["weights"])
            tokens = tokens._replace(sampler_error=error.reshape(-1, 2))
        return tokens._replace(logprobs=jnp.sum(rows["weights"] * tokens.logprobs, axis=1).reshape(-1, 2))


def preference_loss(scorer: PairScorer, task: DpoTask, reference: Reference) -> LossFn:
    """The loss of task.loss. With a cached reference, batches contain its log-probs, [B] each."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        scored = scorer.score(weights, batch, key, is_adapted=True)
        logprobs, aux = scored.logprobs, scored.aux
        if reference is Reference.adapter_off:
            reference_logprobs = jax.lax.stop_gradient(scorer(weights, batch, None, is_adapted=False))
        elif reference is Reference.cached:
            reference_logprobs = jnp.stack([batch[f"{role}_reference"] for role in ROLES], axis=1)
        else:
            reference_logprobs = jnp.zeros_like(logprobs)
        tokens = [jnp.sum(batch[f"{role}_weights"], axis=1) for role in ROLES]
        chosen, rejected = (Completions(logprobs[:, i], reference_logprobs[:, i], tokens[i]) for i in range(2))
        pairs = Pairs(chosen, rejected, batch.get("label"))
        sums = add_aux_losses(_sums(pairs, task), aux)
        error = scored.sampler_error
        return sums if error is None else {**sums, ROW_VALUES: {"sampler_error": error}}

    return loss


def _sums(pairs: Pairs, task: DpoTask) -> Sums:
    """Sums over pairs of the loss, accuracy, rewards and log-probs."""
    chosen, rejected = rewards(pairs.chosen, task), rewards(pairs.rejected, task)
    if pairs.labels is not None:
        kl = _kl(pairs, pairs.rejected)
        margin = jnp.where(pairs.labels > 0, 1, -1) * (chosen - task.beta * kl)
        metrics = {"accuracy": margin > 0, "reward_margin": margin, "kl": jnp.broadcast_to(kl, margin.shape)}
        return _summed(pairs, task, metrics)
    metrics = {
        "accuracy": chosen > rejected,
        "reward_margin": chosen - rejected,
        "reward_chosen": chosen,
        "reward_rejected": rejected,
        "logprob_chosen": pairs.chosen.logprobs,
        "logprob_rejected": pairs.rejected.logprobs,
    }
    return _summed(pairs, task, metrics)


def _summed(pairs: Pairs, task: DpoTask, metrics: dict[str, jax.Array]) -> Sums:
    sums = {name: jax.lax.stop_gradient(jnp.sum(pairs.counts * values)) for name, values in metrics.items()}
    return {"loss": jnp.sum(losses(pairs, task)), "weight": jnp.sum(pairs.counts), **sums}


def interleave(batch: Batch, name: str) -> jax.Array:
    """A column of both completions as [2B, S], those of a pair adjacent, so that no row leaves its device."""
    both = jnp.stack([batch[f"{role}_{name}"] for role in ROLES], axis=1)
    return both.reshape(-1, *both.shape[2:])


def passes(reference: Reference) -> float:
    """Forward and backward passes per pair: two, plus a forward pass over each completion for adapter_off.

    A forward pass costs a third of both.
    """
    return 2 + (2 / 3 if reference is Reference.adapter_off else 0)
