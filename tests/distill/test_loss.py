"""Divergences against torch.kl_div and TRL's generalized Jensen-Shannon divergence: values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.tasks.distill import DistillTask, Divergence, FeatureLoss, Features
from maxhydra.distill.loss import TEACHER as TEACHER_KEY
from maxhydra.distill.loss import (
    StudentTeacher,
    distillation_loss,
    divergence,
    feature_distance,
    gather_top_k,
    log_probs,
)
from maxhydra.distill.on_policy import sampled_row
from maxhydra.distill.teacher import OnlineTeacher
from maxhydra.layers import Context
from maxhydra.sharding import Sharder
from tests.distill.test_distill import LARGER, SMALLEST
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
gkd = import_optional("trl.experimental.gkd", extra="parity")
pytestmark = pytest.mark.parity

B, S, V = 2, 5, 19
RNG = np.random.default_rng(0)
STUDENT, TEACHER = (3 * RNG.normal(size=(B, S, V)).astype(np.float32) for _ in range(2))
# Random token weights: a plain sum could hide an error in one token.
TOKEN_WEIGHTS = RNG.normal(size=(B, S)).astype(np.float32)


def reference_divergence(kind: Divergence, beta: float, temperature: float) -> tuple[Any, Any]:
    student = torch.tensor(STUDENT, requires_grad=True)
    teacher = torch.tensor(TEACHER)
    if kind is Divergence.jensen_shannon:
        elementwise = gkd.GKDTrainer.generalized_jsd_loss(
            student, teacher, beta=beta, temperature=temperature, reduction="none"
        )
    else:
        q, p = (torch.log_softmax(x / temperature, -1) for x in (student, teacher))
        pair = (q, p) if kind is Divergence.forward_kl else (p, q)
        elementwise = torch.nn.functional.kl_div(*pair, reduction="none", log_target=True)
    result = temperature**2 * elementwise.sum(-1)
    (torch.tensor(TOKEN_WEIGHTS) * result).sum().backward()
    return result.detach().numpy(), student.grad.numpy()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", Divergence)
def test_values_and_gradients(kind: Divergence, temperature: float) -> None:
    temperatures = jnp.full((B, S), temperature)

    def our_divergence(student: jax.Array) -> jax.Array:
        p, q = log_probs(jnp.asarray(TEACHER), temperatures), log_probs(student, temperatures)
        return divergence(p, q, kind, beta=jnp.full((B, S), 0.3), temperature=temperatures)

    expected, expected_gradient = reference_divergence(kind, 0.3, temperature)
    np.testing.assert_allclose(our_divergence(STUDENT), expected, rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda student: jnp.sum(TOKEN_WEIGHTS * our_divergence(student)))(STUDENT)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", Divergence)
def test_top_k_of_all_tokens_is_the_full_distribution(kind: Divergence) -> None:
    temperatures, beta = jnp.full((B, S), 2.0), jnp.full((B, S), 0.3)
    ids = np.argsort(-TEACHER, axis=-1)
    log_p = log_probs(np.take_along_axis(TEACHER, ids, -1), temperatures)
    got = divergence(
        log_p, gather_top_k(log_probs(STUDENT, temperatures), ids, kind), kind, beta=beta, temperature=temperatures
    )
    np.testing.assert_allclose(got, reference_divergence(kind, 0.3, 2.0)[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", Divergence)
def test_top_k_of_a_teacher(kind: Divergence) -> None:
    """Against NumPy: p is renormalized over the top k, q too except for forward KL."""
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
    temperature, beta = jnp.ones((B, S)), jnp.full((B, S), 0.3)
    log_p = log_probs(jnp.asarray(np.take_along_axis(TEACHER, ids, -1)), temperature)
    log_q = gather_top_k(log_probs(jnp.asarray(STUDENT), temperature), ids, kind)
    got = divergence(log_p, log_q, kind, beta=beta, temperature=temperature)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("jensen_shannon-0.3")
@pytest.mark.parametrize(("kind", "beta"), [("forward_kl", 0.0), ("reverse_kl", 1.0), ("jensen_shannon", 0.3)])
def test_loss_of_a_sampled_batch(kind: str, beta: float) -> None:
    """Loss, and gradient with respect to the student's head, equal those of TRL's GKDTrainer on the same tokens."""
    rng = np.random.default_rng(0)
    zeros = {name: np.zeros(8, np.int32) for name in ("tokens", "targets", "positions")}
    empty = {**zeros, "weights": np.zeros(8, np.float32)}
    rows = [sampled_row(empty, rng.integers(0, 50, 3).tolist(), rng.integers(0, 50, n).tolist()) for n in (2, 4)]
    values = {"alpha": 1.0, "temperature": 1.0, "beta": beta}
    batch = {name: jnp.asarray(np.stack([row[name] for row in rows])) for name in empty}
    batch |= {name: jnp.full(2, value) for name, value in values.items()}
    task = DistillTask(divergence=Divergence(kind), beta=beta if kind == "jensen_shannon" else None)
    student, teacher = (jax.jit(model.init)(jax.random.key(i)) for i, model in enumerate((SMALLEST, LARGER)))
    comparison = StudentTeacher(SMALLEST, Sharder.single(), OnlineTeacher(LARGER, Sharder.single()), Features(), 0)
    loss = distillation_loss(comparison, task)

    def mean(head: jax.Array) -> jax.Array:
        sums = loss({**student, "head": {"kernel": head}, TEACHER_KEY: teacher}, batch, None)
        return sums["loss"] / sums["weight"]

    value, gradient = jax.jit(jax.value_and_grad(mean))(student["head"]["kernel"])
    context = Context.of_batch(batch, Sharder.single(), None)
    hidden, teacher_hidden = (
        np.array(jax.jit(lambda params, model=model: model.hidden(params, batch["tokens"], context)[0])(params))
        for model, params in ((SMALLEST, student), (LARGER, teacher))
    )
    kernel = torch.tensor(np.array(student["head"]["kernel"]), requires_grad=True)
    logits = torch.tensor(hidden) @ kernel, torch.tensor(teacher_hidden @ np.array(teacher["head"]["kernel"]))
    labels = torch.tensor(np.where(np.array(batch["weights"]) > 0, np.array(batch["targets"]), -100))
    expected = gkd.GKDTrainer.generalized_jsd_loss(*logits, labels=labels, beta=beta)
    expected.backward()
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, kernel.grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [FeatureLoss.cosine, FeatureLoss.l2])
def test_features(kind: FeatureLoss) -> None:
    student, teacher = torch.tensor(STUDENT, requires_grad=True), torch.tensor(TEACHER)
    if kind is FeatureLoss.cosine:
        expected = 1 - torch.nn.functional.cosine_similarity(student, teacher, dim=-1)
    else:
        expected = torch.nn.functional.mse_loss(student, teacher, reduction="none").mean(-1)
    expected.sum().backward()
    np.testing.assert_allclose(feature_distance(STUDENT, TEACHER, kind), expected.detach(), rtol=1e-5, atol=1e-5)
    gradient = jax.grad(lambda x: jnp.sum(feature_distance(x, TEACHER, kind)))(STUDENT)
    np.testing.assert_allclose(gradient, student.grad, rtol=1e-5, atol=1e-5)
    zeros = jnp.zeros((1, 4))
    assert np.isfinite(jax.grad(lambda x: jnp.sum(feature_distance(x, zeros, kind)))(zeros)).all()
