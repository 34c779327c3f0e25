"""Policy losses of a batch of rollouts, returned as sums over the batch.

B completions, S positions. For a token with advantage A, ratio = exp(new - old), and its loss is

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) * importance(old - sampled) + beta KL(new, reference)

dapo, grpo and dr_grpo differ in how the token losses are averaged; gspo and rloo have one ratio per completion; cispo
uses the clipped ratio as a constant weight of the log-prob.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.policy import Clip, Importance, KlEstimator, PolicyLoss
from maxhydra.config.schema.tasks.training import GrpoTask, importance_of
from maxhydra.model import values_of
from maxhydra.rl.setup import policy_weights
from maxhydra.train import Scorer
from maxhydra.train.loss import ROW_VALUES, Batch, LossFn, Sums, Tree, add_aux_losses, sampler_error

# Columns of a batch that rl/batches.py computes before training on it.
OLD_LOGPROBS, REFERENCE_LOGPROBS = "old_logprobs", "reference_logprobs"
# Columns of a critic: its values before the first update on the batch, and the returns that it learns.
OLD_VALUES, RETURNS = "old_values", "returns"
# Value of each row of a batch that has no old log-probs.
SAMPLER_ERROR = "sampler_error"
# Losses that are a mean over all tokens of the batch, so that each token counts the same in a long completion.
TOKEN_MEAN = (PolicyLoss.dapo, PolicyLoss.cispo, PolicyLoss.reinforce_pp)


def group_loss(scorer: Scorer, task: GrpoTask) -> LossFn:
    """The loss of task.loss. A batch without `old_logprobs` is on-policy: the current weights sampled it."""

    def loss(weights: Tree, batch: Batch, key: jax.Array | None) -> Sums:
        scored = scorer.score(policy_weights(weights), batch, key, is_adapted=True, with_entropy=task.entropy_bonus > 0)
        logprobs = Logprobs(
            new=scored.logprobs,
            old=batch.get(OLD_LOGPROBS, jax.lax.stop_gradient(scored.logprobs)),
            sampled=batch["sampled_logprobs"],
            reference=batch.get(REFERENCE_LOGPROBS),
            entropy=scored.entropy,
        )
        sums = policy_loss(logprobs, batch["advantages"], batch["weights"], task)
        if OLD_LOGPROBS not in batch:
            sums[ROW_VALUES] = {SAMPLER_ERROR: sampler_error(logprobs.old, logprobs.sampled, batch["weights"])}
        if task.has_value_head:
            values = values_of(weights, scored.hidden_BTD)
            errors = value_loss(values, batch[OLD_VALUES], batch[RETURNS], batch["weights"], task.critic.clip)
            sums |= {"loss": sums["loss"] + task.critic.weight * errors * sums["weight"]}
            sums |= {"value_loss": jax.lax.stop_gradient(errors * sums["weight"])}
        return add_aux_losses(sums, scored.aux)

    return loss


def value_loss(
    values: jax.Array, old_values: jax.Array, returns: jax.Array, mask_BS: jax.Array, clip: float | None
) -> jax.Array:
    """Half the squared error of the values, as a mean over tokens; clipped to a range around the old values (PPO)."""
    squares = jnp.square(values - returns)
    if clip is not None:
        near = old_values + jnp.clip(values - old_values, -clip, clip)
        squares = jnp.maximum(squares, jnp.square(near - returns))
    return 0.5 * jnp.sum(jnp.where(mask_BS > 0, squares, 0)) / jnp.maximum(jnp.sum(mask_BS > 0), 1)


class Logprobs(NamedTuple):
    """Log-probs [B, S] of completion tokens."""

    new: jax.Array
    """Under the weights that are trained."""
    old: jax.Array
    """Under the weights that sampled the completions."""
    sampled: jax.Array
    """Under the same weights, as computed by the decode engine."""
    reference: jax.Array | None
    """Under the initial weights; None without a KL term in the loss."""
    entropy: jax.Array | None = None
    """Entropy of the distribution that each token was sampled from, under the weights that are trained; None without an
    entropy bonus."""


def policy_loss(logprobs: Logprobs, advantages_BS: jax.Array, mask_BS: jax.Array, task: GrpoTask) -> Sums:
    """Sums whose ratio loss / weight is minimized, and sums of metrics.

    `mask_BS` is 1 at the tokens that count. Completions without any are excluded, from the weight too.
    """
    # Ratios at prompt and padding positions are unbounded, and infinity times 0 would be NaN.
    logprobs = jax.tree.map(lambda x: jnp.where(mask_BS > 0, x, 0), logprobs)
    ratio = jnp.exp(_log_ratio(logprobs, mask_BS, task.loss))
    if task.loss is PolicyLoss.cispo:
        losses = -jax.lax.stop_gradient(jnp.minimum(ratio, 1 + task.clip.high)) * advantages_BS * logprobs.new
    else:
        losses = -clipped_objective(ratio, advantages_BS, task.clip)
    weights = importance_weights(logprobs.old - logprobs.sampled, mask_BS, task)
    losses *= weights
    metrics = {
        "clip_share": is_clipped(ratio, advantages_BS, task),
        "entropy": -logprobs.new if logprobs.entropy is None else logprobs.entropy,
        "sampler_error": jnp.exp(jnp.abs(logprobs.old - logprobs.sampled)),
    }
    if importance_of(task) is not None:
        metrics["importance_weight"] = jnp.broadcast_to(weights, mask_BS.shape)
    if logprobs.reference is not None:
        metrics["kl"] = kl_estimate(logprobs.new, logprobs.reference, task.kl.estimator)
        losses += task.kl.beta * metrics["kl"]

    lengths_B1 = jnp.sum(mask_BS, axis=1, keepdims=True)
    means_BS = mask_BS if task.loss in TOKEN_MEAN else mask_BS / jnp.maximum(lengths_B1, 1)
    share_BS = mask_BS / task.max_tokens if task.loss is PolicyLoss.dr_grpo else means_BS
    sums = {name: jax.lax.stop_gradient(jnp.sum(means_BS * value)) for name, value in metrics.items()}
    loss, weight = jnp.sum(share_BS * losses), jnp.sum(means_BS)
    if logprobs.entropy is not None:
        # The mean over tokens, however the loss is averaged.
        mean_entropy = jnp.sum(mask_BS * logprobs.entropy) / jnp.maximum(jnp.sum(mask_BS), 1)
        loss -= task.entropy_bonus * mean_entropy * weight
    return {"loss": loss, "weight": weight, **sums}


def _log_ratio(logprobs: Logprobs, mask_BS: jax.Array, loss: PolicyLoss) -> jax.Array:
    """log(new / old) of each token; of the completion for the losses with one ratio per completion.

    gspo is GSPO-token: the value is the mean over the completion, the gradient that of each token. The mean of [B, S]
    over tokens gives rloo's losses the gradient of one loss per completion.
    """
    log_ratio = logprobs.new - logprobs.old
    total_B1 = jnp.sum(log_ratio * mask_BS, axis=1, keepdims=True)
    if loss is PolicyLoss.rloo:
        return jnp.broadcast_to(total_B1, mask_BS.shape)
    if loss is PolicyLoss.gspo:
        mean_B1 = total_B1 / jnp.maximum(jnp.sum(mask_BS, axis=1, keepdims=True), 1)
        return jax.lax.stop_gradient(mean_B1) + logprobs.new - jax.lax.stop_gradient(logprobs.new)
    return log_ratio


def importance_weights(log_ratio: jax.Array, mask_BS: jax.Array, task: GrpoTask) -> jax.Array:
    """Weights, [B, S] or [B, 1], that correct for tokens sampled with other probabilities than the trainer computes.

    `log_ratio` is log(trainer / sampler) of each token. Truncated importance sampling bounds the ratio (Yao et al.,
    2025); masked importance sampling excludes tokens or completions whose ratio is out of bounds.
    """
    mode = importance_of(task)
    if mode is None or task.importance_cap is None:
        return jnp.ones(())
    if mode in (Importance.sequence_truncate, Importance.sequence_mask):
        log_ratio = jnp.sum(log_ratio * mask_BS, axis=1, keepdims=True)
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio))
    floor = task.importance_floor or 0.0
    if mode in (Importance.token_truncate, Importance.sequence_truncate):
        return jnp.clip(ratio, floor, task.importance_cap)
    return jnp.where((ratio >= floor) & (ratio <= task.importance_cap), ratio, 0.0)


def clipped_objective(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """PPO's clipped surrogate, which has no gradient once the ratio has moved past the clip range."""
    bounded = ratio if clip.dual is None else jnp.minimum(ratio, clip.dual)
    return jnp.minimum(bounded * advantages, jnp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)


def is_clipped(ratio: jax.Array, advantages: jax.Array, task: GrpoTask) -> jax.Array:
    """1 where the objective has no gradient, with cispo where the weight is at its bound; else 0."""
    clip = task.clip
    too_high = (ratio > 1 + clip.high) & (advantages > 0)
    if task.loss is PolicyLoss.cispo:
        return too_high.astype(jnp.float32)
    too_low = (ratio < 1 - clip.low) & (advantages < 0)
    is_beyond_dual = False if clip.dual is None else (ratio > clip.dual) & (advantages < 0)
    return (too_low | too_high | is_beyond_dual).astype(jnp.float32)


def kl_estimate(new: jax.Array, reference: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Per-token estimates of KL(new || reference): k1 and k3 are unbiased, k2 and k3 never negative.

    As a loss, k2 has the gradient of the true divergence; the expected gradient of k1 is 0, so it is only a metric.
    """
    log_ratio = reference - new
    if estimator is KlEstimator.k1:
        return -log_ratio
    return jnp.square(log_ratio) / 2 if estimator is KlEstimator.k2 else jnp.expm1(log_ratio) - log_ratio
