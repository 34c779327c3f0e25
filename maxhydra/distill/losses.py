"""Divergences between a teacher's and a student's distribution of each token, and between their activations.

p is the teacher's distribution, q the student's, both softmax(logits / T). Arrays are [..., V], results [...].
"""

import jax
import jax.numpy as jnp

from maxhydra.config.schema.tasks.distill import Divergence, FeatureLoss


def divergence(
    log_p: jax.Array, log_q: jax.Array, kind: Divergence, *, beta: jax.Array | None, temperature: jax.Array
) -> jax.Array:
    """T^2 times KL(p | q), KL(q | p), or beta KL(p | m) + (1 - beta) KL(q | m) with m = beta p + (1 - beta) q."""
    match kind:
        case Divergence.forward_kl:
            found = _kl(log_p, log_q)
        case Divergence.reverse_kl:
            found = _kl(log_q, log_p)
        case Divergence.jensen_shannon:
            assert beta is not None
            share = beta[..., None]
            log_m = jnp.logaddexp(log_p + jnp.log(share), log_q + jnp.log1p(-share))
            found = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return jnp.square(temperature) * found


def log_probs(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """log softmax(logits / T), in float32."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[..., None])


def at_top(log_q: jax.Array, ids: jax.Array, kind: Divergence) -> jax.Array:
    """The student's log-probs of the tokens that a teacher kept, [..., k].

    The teacher's k probabilities are taken to be all: what it gave to other tokens is spread over them in proportion.
    For the forward divergence the student's stay parts of its whole, so that what it gives to other tokens is lost to
    it; for the others, which would be infinite there, they are made to sum to 1 too, and other tokens do not count.
    """
    kept = jnp.take_along_axis(log_q, ids, axis=-1)
    return kept if kind is Divergence.forward_kl else jax.nn.log_softmax(kept)


def feature_distance(student: jax.Array, teacher: jax.Array, kind: FeatureLoss) -> jax.Array:
    """1 - cosine, or the mean squared difference, of activations [..., D]."""
    one, other = student.astype(jnp.float32), teacher.astype(jnp.float32)
    if kind is FeatureLoss.l2:
        return jnp.mean(jnp.square(one - other), axis=-1)
    sizes = jnp.sum(one * one, axis=-1) * jnp.sum(other * other, axis=-1)
    # The least size keeps the gradient of a vector of zeros finite, as in padding.
    return 1 - jnp.sum(one * other, axis=-1) * jax.lax.rsqrt(jnp.maximum(sizes, 1e-16))


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
