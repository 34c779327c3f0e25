"""Preference losses against TRL, or the paper's formula in torch if TRL has none: values and gradients.

TRL's functions take any log-probs: with log-ratios to a reference, CPO's losses are those of DPO (with label smoothing
as in cDPO) and IPO. Differences: ORPO's likelihood term is the mean over the tokens of each completion, as in the
paper, whereas TRL averages over all tokens of a batch, including prompts. TRL removed paired KTO, so it is spelled out.
"""

import dataclasses
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.align.loss import Completions, Pairs, losses, rewards
from maxhydra.config.schema.tasks.training import DpoTask, PreferenceLoss
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
cpo = import_optional("trl.experimental.cpo", extra="parity")
orpo = import_optional("trl.experimental.orpo", extra="parity")
pytestmark = pytest.mark.parity

B = 7
RNG = np.random.default_rng(0)
# Log-probs of both completions under the model and the reference, and their numbers of tokens.
VALUES = {name: RNG.normal(-20, 8, B).clip(max=-0.5).astype(np.float32) for name in ("c", "r", "c_ref", "r_ref")}
TOKENS = {name: RNG.integers(5, 30, B).astype(np.float32) for name in ("c", "r")}
ACCELERATOR = SimpleNamespace(device="cpu")


def our_losses(task: DpoTask, padding: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Losses, and the gradients of their sum with respect to both log-probs."""

    def padded(values: np.ndarray) -> jax.Array:
        return jnp.concatenate([jnp.asarray(values), jnp.zeros(padding)])

    def all_losses(c: jax.Array, r: jax.Array) -> jax.Array:
        c_ref, r_ref, c_tokens, r_tokens = map(padded, (VALUES["c_ref"], VALUES["r_ref"], TOKENS["c"], TOKENS["r"]))
        return losses(Pairs(Completions(c, c_ref, c_tokens), Completions(r, r_ref, r_tokens)), task)

    inputs = padded(VALUES["c"]), padded(VALUES["r"])
    gradients = jax.grad(lambda *x: jnp.sum(all_losses(*x)), (0, 1))(*inputs)
    return np.asarray(all_losses(*inputs)), list(map(np.asarray, gradients))


def reference_losses(task: DpoTask) -> tuple[Any, list[Any]]:
    c, r = (torch.tensor(VALUES[name], requires_grad=True) for name in ("c", "r"))
    n_c, n_r = (torch.tensor(TOKENS[name]) for name in ("c", "r"))
    h_c, h_r = c - torch.tensor(VALUES["c_ref"]), r - torch.tensor(VALUES["r_ref"])
    settings = SimpleNamespace(
        alpha=0.0,
        beta=task.beta,
        label_smoothing=task.label_smoothing,
        simpo_gamma=task.margin,
        loss_type=task.loss.value,
        accelerator=ACCELERATOR,
    )
    match task.loss:
        case PreferenceLoss.sigmoid:
            result = cpo.CPOTrainer.cpo_loss(settings, h_c, h_r)[0]
        case PreferenceLoss.ipo:
            result = cpo.CPOTrainer.cpo_loss(settings, h_c / n_c, h_r / n_r)[0]
        case PreferenceLoss.simpo:
            result = cpo.CPOTrainer.cpo_loss(settings, c / n_c, r / n_r)[0]
        case PreferenceLoss.cpo:
            result = cpo.CPOTrainer.cpo_loss(SimpleNamespace(**{**vars(settings), "loss_type": "sigmoid"}), c, r)[0]
        case PreferenceLoss.orpo:
            result = -c / n_c - orpo.ORPOTrainer.odds_ratio_loss(settings, c / n_c, r / n_r)[0]
        case PreferenceLoss.kto_pair:
            z_c, z_r = (h.mean().clamp(min=0).detach() for h in (h_c, h_r))
            chosen = 1 - torch.sigmoid(task.beta * (h_c - z_r))
            result = (chosen + 1 - torch.sigmoid(task.beta * (z_c - h_r))) / 2
    # TRL adds the mean over all tokens of a batch; the papers, that of each completion.
    result = result - task.nll_weight * c / n_c
    result.sum().backward()
    return result.detach().numpy(), [x.grad.numpy() for x in (c, r)]


CASES = [
    {"loss": PreferenceLoss.sigmoid},
    {"loss": PreferenceLoss.sigmoid, "beta": 0.5, "label_smoothing": 0.2},
    {"loss": PreferenceLoss.ipo, "beta": 0.3},
    {"loss": PreferenceLoss.orpo, "beta": 0.4},
    {"loss": PreferenceLoss.simpo, "beta": 2.0, "margin": 0.7, "label_smoothing": 0.1},
    {"loss": PreferenceLoss.cpo, "label_smoothing": 0.1, "nll_weight": 1.0},
    {"loss": PreferenceLoss.sigmoid, "nll_weight": 0.5},
    {"loss": PreferenceLoss.kto_pair, "beta": 0.2},
]


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_values_and_gradients(case: dict[str, Any]) -> None:
    task = DpoTask(**case)
    assert not list(task.check())
    (got, got_gradients), (expected, expected_gradients) = our_losses(task), reference_losses(task)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for gradient, expected_gradient in zip(got_gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.default_cases("PreferenceLoss.orpo-0.4", "PreferenceLoss.kto_pair-0.2")
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_padding_rows_change_nothing(case: dict[str, Any]) -> None:
    task = DpoTask(**case)
    plain, padded = our_losses(task), our_losses(task, padding=3)
    np.testing.assert_allclose(padded[0], np.append(plain[0], [0, 0, 0]), rtol=1e-6)
    for gradient, expected in zip(padded[1], plain[1], strict=True):
        np.testing.assert_allclose(gradient, np.append(expected, [0, 0, 0]), rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_kto_of_labeled_completions() -> None:
    """The lines of TRL's KTOTrainer._compute_loss, which has no function for them; z from mismatched completions."""
    labels = np.array([1, 0, 1, 1, 0, 0, 1], np.float32)
    task = DpoTask(loss=PreferenceLoss.kto, beta=0.2, desirable_weight=1.3, undesirable_weight=0.7)
    assert not list(task.check())

    def our_loss(c: jax.Array, r: jax.Array, padding: int = 0) -> jax.Array:
        arrays = [c, VALUES["c_ref"], TOKENS["c"], r, VALUES["r_ref"], TOKENS["r"], labels]
        padded = [jnp.concatenate([jnp.asarray(x), jnp.zeros(padding)]) for x in arrays]
        return losses(Pairs(Completions(*padded[:3]), Completions(*padded[3:6]), padded[6]), task)

    # Mismatched completions that have become likelier, so that z is not 0.
    mismatched = VALUES["r_ref"] + np.linspace(-1, 4, B, dtype=np.float32)
    c, kl_logps = (torch.tensor(x, requires_grad=True) for x in (VALUES["c"], mismatched))
    is_chosen = torch.tensor(labels) > 0
    kl = (kl_logps - torch.tensor(VALUES["r_ref"])).mean().detach().clamp(min=0)
    logratios = c - torch.tensor(VALUES["c_ref"])
    chosen_losses = 1 - torch.sigmoid(task.beta * (logratios - kl))
    rejected_losses = 1 - torch.sigmoid(task.beta * (kl - logratios))
    expected = torch.where(is_chosen, 1.3 * chosen_losses, 0.7 * rejected_losses)
    expected.sum().backward()
    assert kl > 0.5
    np.testing.assert_allclose(our_loss(VALUES["c"], mismatched), expected.detach(), rtol=1e-5, atol=1e-6)
    by_c, by_r = jax.grad(lambda *x: jnp.sum(our_loss(*x)), (0, 1))(VALUES["c"], mismatched)
    np.testing.assert_allclose(by_c, c.grad, rtol=1e-5, atol=1e-6)
    assert not by_r.any()
    np.testing.assert_allclose(our_loss(VALUES["c"], mismatched, 2)[:B], expected.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_completions_of_probability_1_have_finite_odds() -> None:
    completions = Completions(jnp.zeros(1), jnp.zeros(1), jnp.ones(1))
    task = DpoTask(loss=PreferenceLoss.orpo)

    def loss(certain: jax.Array) -> jax.Array:
        return jnp.sum(losses(Pairs(Completions(certain, jnp.zeros(1), jnp.ones(1)), completions), task))

    assert np.isfinite(loss(jnp.zeros(1))) and np.isfinite(jax.grad(loss)(jnp.zeros(1))).all()


def test_rewards() -> None:
    completions = Completions(*(jnp.asarray([x]) for x in (-6.0, -4.0, 3.0)))
    np.testing.assert_allclose(rewards(completions, DpoTask(beta=0.5)), [-1.0])
    np.testing.assert_allclose(rewards(completions, DpoTask(beta=0.5, loss=PreferenceLoss.orpo)), [-1.0])
    np.testing.assert_allclose(
        rewards(dataclasses.replace(completions, reference=jnp.zeros(1)), DpoTask(beta=0.5, loss=PreferenceLoss.cpo)),
        [-3.0],
    )
    np.testing.assert_allclose(rewards(completions, DpoTask(beta=1.0, loss=PreferenceLoss.simpo, margin=0.0)), [-2.0])
