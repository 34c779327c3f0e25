"""Policy losses of a batch of rollouts, returned as sums over the batch.

B completions, S positions. For a token with advantage A, ratio = exp(new - old), and its loss is

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) * min(exp(old - sampled), cap) + beta KL(new, reference)

grpo, dr_grpo and dapo differ in how the token losses are averaged; gspo has a sequence-level ratio.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.training import Clip, GrpoTask, KlEstimator, PolicyLoss
from maxhydra.rl.setup import policy_weights
from maxhydra.train import Scorer
from maxhydra.train.loss import Batch, LossFn, Sums, Tree, add_aux_losses

# Columns of a batch that rl/batches.py computes before training on it.
OLD_LOGPROBS, REFERENCE_LOGPROBS = "old_logprobs", "reference_logprobs"


def group_loss(scorer: Scorer, task: GrpoTask) -> LossFn:
    """The loss of task.loss. A batch without `old_logprobs` is on-policy: the current weights sampled it."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        new, aux = scorer.score(policy_weights(weights), batch, key, is_adapted=True)
        logprobs = Logprobs(
            new=new,
            old=batch.get(OLD_LOGPROBS, jax.lax.stop_gradient(new)),
            sampled=batch["sampled_logprobs"],
            reference=batch.get(REFERENCE_LOGPROBS),
        )
        return add_aux_losses(policy_loss(logprobs, batch["advantages"], batch["weights"], task), aux)

    return loss


class Logprobs(NamedTuple):
    """Log-probs [B, S] of completion tokens."""

    new: jax.Array
    """Under the weights that are trained."""
    old: jax.Array
    """Under the weights that sampled the completions."""
    sampled: jax.Array
    """Under the same weights, as computed by the decode engine."""
    reference: jax.Array | None
    """Under the initial weights; None without a KL term."""


def policy_loss(logprobs: Logprobs, advantages_BS: jax.Array, mask_BS: jax.Array, task: GrpoTask) -> Sums:
    """Sums whose ratio loss / weight is minimized, and sums of metrics.

    `mask_BS` is 1 at the tokens that count. Completions without any are excluded, from the weight too.
    """
    # Ratios at prompt and padding positions are unbounded, and infinity times 0 would be NaN.
    logprobs = jax.tree.map(lambda x: jnp.where(mask_BS > 0, x, 0), logprobs)
    is_sequence_level = task.loss is PolicyLoss.gspo
    log_ratio = logprobs.new - logprobs.old
    ratio = jnp.exp(sequence_log_ratio(logprobs.new, log_ratio, mask_BS) if is_sequence_level else log_ratio)
    losses = -clipped_objective(ratio, advantages_BS, task.clip)
    if task.importance_cap is not None:
        losses *= jnp.minimum(jnp.exp(logprobs.old - logprobs.sampled), task.importance_cap)
    metrics = {
        "clip_share": is_clipped(ratio, advantages_BS, task.clip),
        "entropy": -logprobs.new,
        "sampler_error": jnp.exp(jnp.abs(logprobs.old - logprobs.sampled)),
    }
    if logprobs.reference is not None:
        metrics["kl"] = kl_estimate(logprobs.new, logprobs.reference, task.kl.estimator)
        losses += task.kl.beta * metrics["kl"]

    lengths_B1 = jnp.sum(mask_BS, axis=1, keepdims=True)
    means_BS = mask_BS if task.loss is PolicyLoss.dapo else mask_BS / jnp.maximum(lengths_B1, 1)
    share_BS = mask_BS / task.max_tokens if task.loss is PolicyLoss.dr_grpo else means_BS
    sums = {name: jax.lax.stop_gradient(jnp.sum(means_BS * value)) for name, value in metrics.items()}
    return {"loss": jnp.sum(share_BS * losses), "weight": jnp.sum(means_BS), **sums}


def sequence_log_ratio(new: jax.Array, log_ratio: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """GSPO-token: the value is the mean log ratio of the completion, the gradient is that of each token."""
    mean_B1 = jnp.sum(log_ratio * mask_BS, axis=1, keepdims=True) / jnp.maximum(jnp.sum(mask_BS, 1, keepdims=True), 1)
    return jax.lax.stop_gradient(mean_B1) + new - jax.lax.stop_gradient(new)


def clipped_objective(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """PPO's clipped surrogate, which has no gradient once the ratio has moved past the clip range."""
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)


def is_clipped(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """1 where the clipped objective has no gradient, else 0."""
    too_low = (ratio < 1 - clip.low) & (advantages < 0)
    too_high = (ratio > 1 + clip.high) & (advantages > 0)
    return (too_low | too_high).astype(jnp.float32)


def kl_estimate(new: jax.Array, reference: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Per-token estimates of KL(new || reference): k1 and k3 are unbiased, k2 and k3 never negative.

    As a loss, k2 has the gradient of the true divergence; the expected gradient of k1 is 0, so it is only a metric.
    """
    log_ratio = reference - new
    if estimator is KlEstimator.k1:
        return -log_ratio
    return jnp.square(log_ratio) / 2 if estimator is KlEstimator.k2 else jnp.expm1(log_ratio) - log_ratio
