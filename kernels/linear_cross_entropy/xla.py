"""Softmax, loss and the gradient of the logits, fused by XLA."""

import jax
import jax.numpy as jnp
import numpy as np


def logprobs_at_targets(wide: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """From float32 logits: log p(target), logsumexp, and the mask of the target's logit."""
    normaliser = jax.nn.logsumexp(wide, axis=-1)
    # A masked sum, not a gather: it fuses with the softmax and stays local when the vocabulary is sharded.
    is_target_logit = is_target(wide, targets)
    return jnp.sum(jnp.where(is_target_logit, wide, 0), axis=-1) - normaliser, normaliser, is_target_logit


def is_target(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return jax.lax.broadcasted_iota(targets.dtype, logits.shape, logits.ndim - 1) == targets[..., None]


def statistics(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """logsumexp of a part of the vocabulary, and the target's logit, 0 if it is not in this part."""
    wide = logits.astype(jnp.float32)
    target_logit = jnp.sum(jnp.where(is_target(wide, targets), wide, 0), axis=-1)
    return jax.nn.logsumexp(wide, axis=-1), target_logit


def gradient(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    normaliser: jax.Array,
    *,
    z_loss: float,
    dtype: np.dtype,
) -> jax.Array:
    """The gradient of the logits, or of a part of them, given the logsumexp of all."""
    softmax = jnp.exp(logits.astype(jnp.float32) - normaliser[..., None])
    slope = softmax * (1 + 2 * z_loss * normaliser)[..., None] - is_target(logits, targets)
    # The barrier prevents fusion into the two matmuls that read it: each would recompute the exponentials.
    return jax.lax.optimization_barrier((weights[..., None] * slope).astype(dtype))


def per_token(
    logits: jax.Array, targets: jax.Array, weights: jax.Array, *, z_loss: float, dtype: np.dtype
) -> tuple[jax.Array, jax.Array, jax.Array]:
    logprobs, normaliser, _ = logprobs_at_targets(logits.astype(jnp.float32), targets)
    d_logits = gradient(logits, targets, weights, normaliser, z_loss=z_loss, dtype=dtype)
    return z_loss * jnp.square(normaliser) - logprobs, -logprobs, d_logits
