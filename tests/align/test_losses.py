"""Preference losses against TRL's, and where TRL has none against the paper's formula in torch: values and gradients.

TRL's functions take log-probs as they come: given log-ratios to a reference, those of CPO are the ones of DPO (with
label smoothing as in cDPO) and IPO. Differences: ORPO's likelihood term is the mean over each answer's tokens, as in
the paper, where TRL averages over the tokens of a batch, prompts included; KTO over pairs left TRL, and is written out.
"""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.align.losses import Answers, Pairs, losses, rewards
from maxhydra.config.schema.tasks.dpo import DpoTask, PreferenceLoss
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
cpo = import_optional("trl.experimental.cpo", extra="parity")
orpo = import_optional("trl.experimental.orpo", extra="parity")
pytestmark = pytest.mark.parity

B = 7
RNG = np.random.default_rng(0)
# Log-probs of both answers under the model and under the reference, and their tokens.
VALUES = {name: RNG.normal(-20, 8, B).clip(max=-0.5).astype(np.float32) for name in ("c", "r", "c_ref", "r_ref")}
TOKENS = {name: RNG.integers(5, 30, B).astype(np.float32) for name in ("c", "r")}
ACCELERATOR = SimpleNamespace(device="cpu")


def ours(task: DpoTask, padding: int = 0) -> tuple[np.ndarray, list[np.ndarray]]:
    """Losses, and the gradients of their sum by the two log-probs."""

    def padded(values: np.ndarray) -> jax.Array:
        return jnp.concatenate([jnp.asarray(values), jnp.zeros(padding)])

    def all_losses(c: jax.Array, r: jax.Array) -> jax.Array:
        c_ref, r_ref, c_tokens, r_tokens = map(padded, (VALUES["c_ref"], VALUES["r_ref"], TOKENS["c"], TOKENS["r"]))
        return losses(Pairs(Answers(c, c_ref, c_tokens), Answers(r, r_ref, r_tokens)), task)

    inputs = padded(VALUES["c"]), padded(VALUES["r"])
    gradients = jax.grad(lambda *x: jnp.sum(all_losses(*x)), (0, 1))(*inputs)
    return np.asarray(all_losses(*inputs)), list(map(np.asarray, gradients))


def theirs(task: DpoTask) -> tuple[Any, list[Any]]:
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
            found = cpo.CPOTrainer.cpo_loss(settings, h_c, h_r)[0]
        case PreferenceLoss.ipo:
            found = cpo.CPOTrainer.cpo_loss(settings, h_c / n_c, h_r / n_r)[0]
        case PreferenceLoss.simpo:
            found = cpo.CPOTrainer.cpo_loss(settings, c / n_c, r / n_r)[0]
        case PreferenceLoss.orpo:
            found = -c / n_c - orpo.ORPOTrainer.odds_ratio_loss(settings, c / n_c, r / n_r)[0]
        case PreferenceLoss.kto_pair:
            z_c, z_r = (h.mean().clamp(min=0).detach() for h in (h_c, h_r))
            chosen = 1 - torch.sigmoid(task.beta * (h_c - z_r))
            found = (chosen + 1 - torch.sigmoid(task.beta * (z_c - h_r))) / 2
    found.sum().backward()
    return found.detach().numpy(), [x.grad.numpy() for x in (c, r)]


CASES = [
    {"loss": PreferenceLoss.sigmoid},
    {"loss": PreferenceLoss.sigmoid, "beta": 0.5, "label_smoothing": 0.2},
    {"loss": PreferenceLoss.ipo, "beta": 0.3},
    {"loss": PreferenceLoss.orpo, "beta": 0.4},
    {"loss": PreferenceLoss.simpo, "beta": 2.0, "margin": 0.7, "label_smoothing": 0.1},
    {"loss": PreferenceLoss.kto_pair, "beta": 0.2},
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_values_and_gradients(case: dict[str, Any]) -> None:
    task = DpoTask(**case)
    assert not list(task.check())
    (got, got_gradients), (expected, expected_gradients) = ours(task), theirs(task)
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
    for one, other in zip(got_gradients, expected_gradients, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case.values())))
def test_rows_that_fill_up_a_batch_change_nothing(case: dict[str, Any]) -> None:
    task = DpoTask(**case)
    plain, padded = ours(task), ours(task, padding=3)
    np.testing.assert_allclose(padded[0], np.append(plain[0], [0, 0, 0]), rtol=1e-6)
    for one, other in zip(padded[1], plain[1], strict=True):
        np.testing.assert_allclose(one, np.append(other, [0, 0, 0]), rtol=1e-6, atol=1e-7)


def test_certain_answers_have_finite_odds() -> None:
    answers = Answers(jnp.zeros(1), jnp.zeros(1), jnp.ones(1))
    task = DpoTask(loss=PreferenceLoss.orpo)

    def loss(certain: jax.Array) -> jax.Array:
        return jnp.sum(losses(Pairs(Answers(certain, jnp.zeros(1), jnp.ones(1)), answers), task))

    assert np.isfinite(loss(jnp.zeros(1))) and np.isfinite(jax.grad(loss)(jnp.zeros(1))).all()


def test_rewards() -> None:
    answers = Answers(*(jnp.asarray([x]) for x in (-6.0, -4.0, 3.0)))
    np.testing.assert_allclose(rewards(answers, DpoTask(beta=0.5)), [-1.0])
    np.testing.assert_allclose(rewards(answers, DpoTask(beta=0.5, loss=PreferenceLoss.orpo)), [-1.0])
    np.testing.assert_allclose(rewards(answers, DpoTask(beta=1.0, loss=PreferenceLoss.simpo, margin=0.0)), [-2.0])
