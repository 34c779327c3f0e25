"""Divergences against torch.kl_div and TRL's generalised Jensen-Shannon divergence: values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.tasks.distill import Divergence, FeatureLoss
from maxhydra.distill.losses import at_top, divergence, feature_distance, log_probs
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
gkd = import_optional("trl.experimental.gkd", extra="parity")
pytestmark = pytest.mark.parity

B, S, V = 2, 5, 19
RNG = np.random.default_rng(0)
STUDENT, TEACHER = (3 * RNG.normal(size=(B, S, V)).astype(np.float32) for _ in range(2))
# What each token counts for: a sum of the losses alone would hide a wrong one.
USE = RNG.normal(size=(B, S)).astype(np.float32)


def theirs(kind: Divergence, beta: float, temperature: float) -> tuple[Any, Any]:
    student = torch.tensor(STUDENT, requires_grad=True)
    teacher = torch.tensor(TEACHER)
    if kind is Divergence.jensen_shannon:
        every = gkd.GKDTrainer.generalized_jsd_loss(
            student, teacher, beta=beta, temperature=temperature, reduction="none"
        )
    else:
        q, p = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
        pair = (q, p) if kind is Divergence.forward_kl else (p, q)
        every = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True)
    found = temperature**2 * every.sum(-1)
    (torch.tensor(USE) * found).sum().backward()
    return found.detach().numpy(), student.grad.numpy()


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", Divergence)
def test_values_and_gradients(kind: Divergence, temperature: float) -> None:
    heat = jnp.full((B, S), temperature)

    def ours(student: jax.Array) -> jax.Array:
        p, q = log_probs(jnp.asarray(TEACHER), heat), log_probs(student, heat)
        return divergence(p, q, kind, beta=jnp.full((B, S), 0.3), temperature=heat)

    expected, expected_gradient = theirs(kind, 0.3, temperature)
    np.testing.assert_allclose(ours(STUDENT), expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda student: jnp.sum(USE * ours(student)))(STUDENT)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", Divergence)
def test_all_tokens_kept_are_the_whole_distribution(kind: Divergence) -> None:
    heat, beta = jnp.full((B, S), 2.0), jnp.full((B, S), 0.3)
    ids = np.argsort(-TEACHER, axis=-1)
    kept = log_probs(np.take_along_axis(TEACHER, ids, -1), heat)
    got = divergence(kept, at_top(log_probs(STUDENT, heat), ids, kind), kind, beta=beta, temperature=heat)
    np.testing.assert_allclose(got, theirs(kind, 0.3, 2.0)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Divergence)
def test_the_top_of_a_teacher(kind: Divergence) -> None:
    """Written out in NumPy: p is renormalised over the k; q for all but the forward divergence."""
    k = 4
    ids = np.argsort(-TEACHER, axis=-1)[..., :k]
    p = np.exp(np.take_along_axis(TEACHER, ids, -1).astype(np.float64))
    p /= p.sum(-1, keepdims=True)
    q = np.exp(STUDENT.astype(np.float64))
    q = np.take_along_axis(q / q.sum(-1, keepdims=True), ids, -1)
    if kind is not Divergence.forward_kl:
        q /= q.sum(-1, keepdims=True)
    m = 0.3 * p + 0.7 * q
    expected = {
        Divergence.forward_kl: p * np.log(p / q),
        Divergence.reverse_kl: q * np.log(q / p),
        Divergence.jensen_shannon: 0.3 * p * np.log(p / m) + 0.7 * q * np.log(q / m),
    }[kind].sum(-1)
    one, beta = jnp.ones((B, S)), jnp.full((B, S), 0.3)
    kept = log_probs(jnp.asarray(np.take_along_axis(TEACHER, ids, -1)), one)
    got = divergence(kept, at_top(log_probs(jnp.asarray(STUDENT), one), ids, kind), kind, beta=beta, temperature=one)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [FeatureLoss.cosine, FeatureLoss.l2])
def test_features(kind: FeatureLoss) -> None:
    one, other = torch.tensor(STUDENT, requires_grad=True), torch.tensor(TEACHER)
    if kind is FeatureLoss.cosine:
        expected = 1 - torch.nn.functional.cosine_similarity(one, other, dim=-1)
    else:
        expected = torch.nn.functional.mse_loss(one, other, reduction="none").mean(-1)
    expected.sum().backward()
    np.testing.assert_allclose(feature_distance(STUDENT, TEACHER, kind), expected.detach(), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(feature_distance(x, TEACHER, kind)))(STUDENT)
    np.testing.assert_allclose(gradient, one.grad, rtol=1e-5, atol=1e-5)
    nothing = jnp.zeros((1, 4))
    assert np.isfinite(jax.grad(lambda x: jnp.sum(feature_distance(x, nothing, kind)))(nothing)).all()
