"""Policy losses against TRL, or against the paper's formula if TRL has none: values and gradients."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.tasks.training import Clip, GrpoTask, Kl, KlEstimator, PolicyLoss, Scale
from maxhydra.rl.loss import Logprobs, kl_estimate, policy_loss
from maxhydra.rl.rollout import advantages, is_degenerate, scale_of
from tests.support.skips import import_optional

B, S = 6, 9
MAX_TOKENS = 12


def inputs(seed: int = 0) -> dict[str, np.ndarray]:
    """Random log-probs, far enough apart that some ratios are clipped either way."""
    random = np.random.default_rng(seed)
    new = -random.gamma(2.0, 0.6, (B, S))
    lengths = random.integers(2, S + 1, B)
    return {
        "new": new,
        "old": new + 0.3 * random.standard_normal((B, S)),
        "sampled": new + 0.3 * random.standard_normal((B, S)),
        "reference": new + 0.5 * random.standard_normal((B, S)),
        "advantages": random.standard_normal(B),
        "mask": (np.arange(S) < lengths[:, None]).astype(np.float64),
    }


def policy_loss_of(task: GrpoTask, given: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss that a step minimizes, and its gradient with respect to the new log-probs."""
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in given.items()}
    advantage = jnp.broadcast_to(arrays["advantages"][:, None], (B, S))

    def loss(new: jax.Array) -> jax.Array:
        reference = arrays["reference"] if task.kl.beta else None
        logprobs = Logprobs(new, arrays["old"], arrays["sampled"], reference)
        sums = policy_loss(logprobs, advantage, arrays["mask"], task)
        return sums["loss"] / sums["weight"]

    value, gradient = jax.value_and_grad(loss)(arrays["new"])
    return float(value), np.asarray(gradient)


def trl_loss(task: GrpoTask, given: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The same with the loss of TRL's GRPOTrainer, given log-probs instead of a model."""
    torch = import_optional("torch", extra="parity")
    trl = import_optional("trl", extra="parity")
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
    new = tensors["new"].clone().requires_grad_()
    trainer: Any = trl.GRPOTrainer.__new__(trl.GRPOTrainer)
    level = "sequence" if task.loss is PolicyLoss.gspo else "token"
    vars(trainer).update(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=task.kl.beta,
        loss_type="grpo" if task.loss is PolicyLoss.gspo else task.loss.value,
        epsilon_low=task.clip.low,
        epsilon_high=task.clip.high,
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=task.importance_cap is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=task.max_tokens,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        accelerator=SimpleNamespace(num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros((B, S), dtype=torch.long)
    ratio = torch.exp(tensors["old"] - tensors["sampled"]).clamp(max=task.importance_cap or 1.0)
    batch = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tensors["mask"],
        "advantages": tensors["advantages"],
        "old_per_token_logps": tensors["old"],
        "ref_per_token_logps": tensors["reference"],
        "importance_sampling_ratio": ratio,
        "num_items_in_batch": tensors["mask"].sum(),
    }
    loss = trainer._compute_loss(None, batch)
    loss.backward()
    return loss.item(), new.grad.numpy()


# With per-token weights, TRL's sequence-level gradient differs from that of GSPO-token, which the next test checks.
CASES = [
    (kind, beta, cap)
    for kind in PolicyLoss
    for beta in (0.0, 0.1)
    for cap in (None, 1.2)
    if cap is None or kind is not PolicyLoss.gspo
]


@pytest.mark.parity
@pytest.mark.parametrize(("kind", "beta", "cap"), CASES)
def test_losses_and_gradients_are_those_of_trl(kind: PolicyLoss, beta: float, cap: float | None) -> None:
    """TRL's GSPO has the sequence-level gradient, which equals GSPO-token's with one advantage per completion."""
    clip = Clip(low=0.1, high=0.28)
    task = GrpoTask(name="grpo", loss=kind, clip=clip, kl=Kl(beta=beta), importance_cap=cap, max_tokens=MAX_TOKENS)
    given = inputs()
    value, gradient = policy_loss_of(task, given)
    expected, expected_gradient = trl_loss(task, given)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


def test_gspo_token_by_its_formula() -> None:
    """s_i,t = sg[s_i] pi / sg[pi]: clipped per completion, with the gradient and advantage of each token."""
    task = GrpoTask(name="grpo", loss=PolicyLoss.gspo, clip=Clip(low=0.05, high=0.05), importance_cap=1.1)
    given = inputs(1)
    mask, advantage = given["mask"], given["advantages"][:, None]
    length = mask.sum(1, keepdims=True)
    ratio = np.exp((mask * (given["new"] - given["old"])).sum(1, keepdims=True) / length)
    weight = np.minimum(np.exp(given["old"] - given["sampled"]), 1.1) * mask / length / B
    is_open = ratio * advantage <= np.clip(ratio, 0.95, 1.05) * advantage
    assert 0 < is_open.sum() < B
    value, gradient = policy_loss_of(task, given)
    expected = -(weight * np.minimum(ratio * advantage, np.clip(ratio, 0.95, 1.05) * advantage)).sum()
    assert value == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(gradient, -weight * ratio * advantage * is_open, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("estimator", KlEstimator)
def test_estimators_of_the_divergence(estimator: KlEstimator) -> None:
    """Under samples from p, the mean of k1 and k3 is the divergence; k2 and k3 are never negative."""
    random = np.random.default_rng(0)
    p, q = (np.exp(x) / np.exp(x).sum() for x in 0.3 * random.standard_normal((2, 5)))
    exact = float((p * np.log(p / q)).sum())
    values = np.asarray(kl_estimate(jnp.log(p), jnp.log(q), estimator), np.float64)
    mean = float((p * values).sum())
    if estimator is KlEstimator.k2:
        assert mean == pytest.approx(float((p * np.log(p / q) ** 2).sum()) / 2, rel=1e-4)
        assert mean == pytest.approx(exact, rel=0.2)
    else:
        assert mean == pytest.approx(exact, rel=1e-3)
    assert (values >= -1e-7).all() or estimator is KlEstimator.k1


@pytest.mark.parametrize("kind", PolicyLoss)
def test_masked_completions_change_nothing(kind: PolicyLoss) -> None:
    task = GrpoTask(name="grpo", loss=kind, kl=Kl(beta=0.1), max_tokens=MAX_TOKENS)
    given = inputs(2)
    given["mask"][3:] = 0
    fewer = {name: value[:3] for name, value in given.items()}
    value, gradient = policy_loss_of(task, given)
    arrays = {name: jnp.asarray(x, jnp.float32) for name, x in fewer.items()}
    logprobs = Logprobs(*(arrays[name] for name in ("new", "old", "sampled", "reference")))
    sums = policy_loss(logprobs, arrays["advantages"][:, None] * jnp.ones((3, S)), arrays["mask"], task)
    assert value == pytest.approx(float(sums["loss"] / sums["weight"]), rel=1e-5)
    assert not gradient[3:].any()


@pytest.mark.parametrize("kind", PolicyLoss)
def test_masked_positions_may_have_any_value(kind: PolicyLoss) -> None:
    """Prompt and padding tokens, whose log-ratios are unbounded."""
    task = GrpoTask(name="grpo", loss=kind, kl=Kl(beta=0.1), importance_cap=2.0, max_tokens=MAX_TOKENS)
    given = inputs(3)
    far = {**given, "new": np.where(given["mask"] == 0, -200.0, given["new"])}
    far["sampled"] = np.where(given["mask"] == 0, 0.0, given["sampled"])
    (value, gradient), (expected, expected_gradient) = policy_loss_of(task, far), policy_loss_of(task, given)
    assert value == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6)
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in far.items()}
    logprobs = Logprobs(*(arrays[name] for name in ("new", "new", "sampled", "reference")))
    sums = policy_loss(logprobs, arrays["advantages"][:, None] * jnp.ones((B, S)), arrays["mask"], task)
    assert all(np.isfinite(value) for value in sums.values())


def test_advantages_are_those_of_the_formula() -> None:
    rewards = np.array([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 2.0]])
    centred = rewards - rewards.mean(1, keepdims=True)
    torch = import_optional("torch", extra="parity")
    group = torch.tensor(rewards).std(dim=1, keepdim=True).numpy() + 1e-4
    np.testing.assert_allclose(advantages(rewards, Scale.group), centred / group, atol=1e-6)
    whole = float(torch.tensor(rewards).std()) + 1e-4
    np.testing.assert_allclose(advantages(rewards, Scale.batch), centred / whole, atol=1e-6)
    np.testing.assert_allclose(advantages(rewards, Scale.none), centred, atol=1e-6)
    assert is_degenerate(rewards).tolist() == [False, True, False]
    assert not advantages(np.full((2, 3), 0.1), Scale.group).any()
    assert scale_of(GrpoTask(name="grpo")) is Scale.group
    assert scale_of(GrpoTask(name="grpo", loss=PolicyLoss.dr_grpo)) is Scale.none
    assert scale_of(GrpoTask(name="grpo", loss=PolicyLoss.dr_grpo, scale=Scale.batch)) is Scale.batch
