"""Policy losses over the log-probabilities of answers' tokens: the formulas alone, as sums that add up over batches.

B answers, S places. For a token: ratio = exp(new - old), and with advantage A its loss is

    -min(ratio A, clip(ratio, 1 - low, 1 + high) A) * min(exp(old - sampled), cap) + beta KL(new, reference)

How the losses of tokens become one is what tells grpo, dr_grpo and dapo apart; gspo has another ratio.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.grpo import Clip, GrpoTask, KlEstimator, PolicyLoss
from maxhydra.train.loss import Sums


class Logprobs(NamedTuple):
    """Log-probabilities [B, S] of the tokens of answers."""

    new: jax.Array
    """Under the weights that are trained."""
    old: jax.Array
    """Under the weights that wrote them."""
    sampled: jax.Array
    """The same, as the sampler computed them."""
    reference: jax.Array | None
    """Under the weights that training began with; None: no divergence is asked for."""


def policy_loss(logprobs: Logprobs, advantages_BS: jax.Array, mask_BS: jax.Array, task: GrpoTask) -> Sums:
    """Sums whose quotient loss / weight is minimised, and beside it what is worth watching.

    `mask_BS` is 1 at the tokens that count. Answers without any count for nothing, in the weight too.
    """
    # At the others stand prompts and padding, whose ratios nothing bounds: infinity times 0 is no number.
    logprobs = jax.tree.map(lambda x: jnp.where(mask_BS > 0, x, 0), logprobs)
    is_whole = task.loss is PolicyLoss.gspo
    log_ratio = logprobs.new - logprobs.old
    ratio = jnp.exp(sequence_log_ratio(logprobs.new, log_ratio, mask_BS) if is_whole else log_ratio)
    losses = -clipped_gain(ratio, advantages_BS, task.clip)
    if task.importance_cap is not None:
        losses *= jnp.minimum(jnp.exp(logprobs.old - logprobs.sampled), task.importance_cap)
    watched = {
        "clip_share": is_clipped(ratio, advantages_BS, task.clip),
        "entropy": -logprobs.new,
        "sampler_error": jnp.exp(jnp.abs(logprobs.old - logprobs.sampled)),
    }
    if logprobs.reference is not None:
        watched["kl"] = divergence(logprobs.new, logprobs.reference, task.kl.estimator)
        losses += task.kl.beta * watched["kl"]

    lengths_B1 = jnp.sum(mask_BS, axis=1, keepdims=True)
    means_BS = mask_BS if task.loss is PolicyLoss.dapo else mask_BS / jnp.maximum(lengths_B1, 1)
    share_BS = mask_BS / task.max_tokens if task.loss is PolicyLoss.dr_grpo else means_BS
    sums = {name: jax.lax.stop_gradient(jnp.sum(means_BS * value)) for name, value in watched.items()}
    return {"loss": jnp.sum(share_BS * losses), "weight": jnp.sum(means_BS), **sums}


def sequence_log_ratio(new: jax.Array, log_ratio: jax.Array, mask_BS: jax.Array) -> jax.Array:
    """GSPO-token: the value is the mean log ratio of the whole answer, the gradient that of each token's own."""
    mean_B1 = jnp.sum(log_ratio * mask_BS, axis=1, keepdims=True) / jnp.maximum(jnp.sum(mask_BS, 1, keepdims=True), 1)
    return jax.lax.stop_gradient(mean_B1) + new - jax.lax.stop_gradient(new)


def clipped_gain(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """What is to be raised, and gives no gradient where the ratio has gone far enough in its direction."""
    return jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip.low, 1 + clip.high) * advantages)


def is_clipped(ratio: jax.Array, advantages: jax.Array, clip: Clip) -> jax.Array:
    """1 where the gain has no gradient."""
    too_low = (ratio < 1 - clip.low) & (advantages < 0)
    too_high = (ratio > 1 + clip.high) & (advantages > 0)
    return (too_low | too_high).astype(jnp.float32)


def divergence(new: jax.Array, reference: jax.Array, estimator: KlEstimator) -> jax.Array:
    """Estimates of KL(new || reference) from tokens of `new`: k1 and k3 are unbiased, k2 and k3 never negative.

    As a loss, k2 has the gradient of the divergence itself; k1 has one of mean 0, and is there to be watched.
    """
    log_ratio = reference - new
    if estimator is KlEstimator.k1:
        return -log_ratio
    return jnp.square(log_ratio) / 2 if estimator is KlEstimator.k2 else jnp.expm1(log_ratio) - log_ratio
