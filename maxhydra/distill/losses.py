"""Divergences between the token distributions of teacher and student, and distances between their activations.

p is the teacher's distribution, q the student's, both softmax(logits / T). Inputs are [..., V], results [...].
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
            result = _kl(log_p, log_q)
        case Divergence.reverse_kl:
            result = _kl(log_q, log_p)
        case Divergence.jensen_shannon:
            assert beta is not None
            share = beta[..., None]
            log_m = jnp.logaddexp(log_p + jnp.log(share), log_q + jnp.log1p(-share))
            result = beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)
    return jnp.square(temperature) * result


def log_probs(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """log softmax(logits / T) in float32."""
    return jax.nn.log_softmax(logits.astype(jnp.float32) / temperature[..., None])


def gather_top_k(log_q: jax.Array, ids: jax.Array, kind: Divergence) -> jax.Array:
    """The student's log-probs of the teacher's top-k tokens, [..., k].

    The teacher's k probabilities are renormalized to sum to 1. For forward KL the student's are not, so that it is
    penalized for probability on other tokens; the other divergences would be infinite there, so the student's are
    renormalized too, and other tokens are ignored.
    """
    top_k = jnp.take_along_axis(log_q, ids, axis=-1)
    return top_k if kind is Divergence.forward_kl else jax.nn.log_softmax(top_k)


def feature_distance(student: jax.Array, teacher: jax.Array, kind: FeatureLoss) -> jax.Array:
    """1 - cosine, or the mean squared difference, of activations [..., D]."""
    x, y = student.astype(jnp.float32), teacher.astype(jnp.float32)
    if kind is FeatureLoss.l2:
        return jnp.mean(jnp.square(x - y), axis=-1)
    squared_norms = jnp.sum(x * x, axis=-1) * jnp.sum(y * y, axis=-1)
    # The lower bound keeps the gradient of a zero vector, as in padding, finite.
    return 1 - jnp.sum(x * y, axis=-1) * jax.lax.rsqrt(jnp.maximum(squared_norms, 1e-16))


def _kl(log_a: jax.Array, log_b: jax.Array) -> jax.Array:
    return jnp.sum(jnp.exp(log_a) * (log_a - log_b), axis=-1)
