"""Policy losses against TRL, or against the paper's formula if TRL has none: values and gradients."""

import dataclasses
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.schema.decode import Engine
from maxhydra.config.schema.tasks.policy import Baseline, Clip, Critic, Importance, Kl, KlEstimator, PolicyLoss, Scale
from maxhydra.config.schema.tasks.training import GrpoTask, importance_of, scale_of
from maxhydra.rl.advantages import advantages, critic_advantages, is_degenerate
from maxhydra.rl.loss import Logprobs, kl_estimate, policy_loss, value_loss
from maxhydra.train.loss import logprobs_and_entropy
from tests.support.skips import import_optional

B, S = 6, 9
MAX_TOKENS = 12
TOKENS = Importance.token_truncate


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
        "entropy": random.gamma(2.0, 0.5, (B, S)),
    }


def policy_loss_of(task: GrpoTask, given: dict[str, np.ndarray]) -> tuple[float, np.ndarray]:
    """The loss that a step minimizes, and its gradient with respect to the new log-probs."""
    arrays = {name: jnp.asarray(value, jnp.float32) for name, value in given.items()}
    advantage = jnp.broadcast_to(arrays["advantages"][:, None], (B, S))

    def loss(new: jax.Array) -> jax.Array:
        reference = arrays["reference"] if task.kl.beta else None
        # The entropy depends on the weights too: it is replaced by a function of the new log-probs.
        entropy = arrays["entropy"] * new**2 if task.entropy_bonus else None
        logprobs = Logprobs(new, arrays["old"], arrays["sampled"], reference, entropy)
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
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, tensors["entropy"] * new**2, None),
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=task.kl.beta,
        loss_type="grpo" if task.loss is PolicyLoss.gspo else task.loss.value,
        epsilon_low=task.clip.low,
        # TRL's bound of CISPO is the ratio itself, not its distance from 1.
        epsilon_high=task.clip.high + (task.loss is PolicyLoss.cispo),
        args=SimpleNamespace(delta=task.clip.dual, use_bias_correction_kl=False, steps_per_generation=1),
        use_vllm=task.importance_cap is not None,
        vllm_importance_sampling_correction=True,
        max_completion_length=task.max_tokens,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=task.entropy_bonus > 0,
        use_adaptive_entropy=False,
        entropy_coef=task.entropy_bonus,
        accelerator=SimpleNamespace(
            num_processes=1, reduce=lambda x, reduction: x, gather=lambda x: x, sync_gradients=True
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros((B, S), dtype=torch.long)
    ratio = trl_importance_ratio(torch, task, tensors)
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


def trl_importance_ratio(torch: Any, task: GrpoTask, tensors: dict[str, Any]) -> Any:
    """Transcribed from TRL, which computes it together with the completions."""
    difference = (tensors["old"] - tensors["sampled"]) * tensors["mask"]
    mode = importance_of(task)
    if mode in (Importance.sequence_truncate, Importance.sequence_mask):
        difference = difference.sum(dim=-1, keepdim=True)
    ratio = torch.exp(difference)
    if mode in (Importance.token_truncate, Importance.sequence_truncate):
        return ratio.clamp(min=task.importance_floor, max=task.importance_cap)
    outside = (ratio < (task.importance_floor or 0.0)) | (ratio > (task.importance_cap or np.inf))
    return ratio.masked_fill(outside, 0.0)


# With per-token weights, TRL's sequence-level gradient differs from that of GSPO-token, which the next test checks.
# rloo and reinforce_pp, which TRL's GRPOTrainer does not have, are tested below.
OF_TRL = (PolicyLoss.dapo, PolicyLoss.grpo, PolicyLoss.dr_grpo, PolicyLoss.gspo, PolicyLoss.cispo)
CASES = [{"loss": loss, "kl": Kl(beta=beta), "importance_cap": None} for loss in OF_TRL for beta in (0.0, 0.1)]
CASES += [
    {"loss": loss, "importance": mode, "importance_cap": 1.2, "importance_floor": floor, "kl": Kl(beta=0.1)}
    for loss in OF_TRL
    for mode in Importance
    for floor in (None, 0.9)
    if loss is not PolicyLoss.gspo or "sequence" in mode.value
]
CASES += [{"loss": loss, "clip": Clip(low=0.1, high=0.28, dual=1.4)} for loss in OF_TRL[:4]]
CASES += [{"loss": loss, "entropy_bonus": 0.03} for loss in OF_TRL]


@pytest.mark.slow
@pytest.mark.parity
@pytest.mark.default_cases(*map(str, CASES[::3]))
@pytest.mark.parametrize("fields", CASES, ids=str)
def test_losses_and_gradients_are_those_of_trl(fields: dict[str, Any]) -> None:
    """TRL's GSPO has the sequence-level gradient, which equals GSPO-token's with one advantage per completion."""
    low = Clip.low if fields["loss"] is PolicyLoss.cispo else 0.1
    task = GrpoTask(**{"name": "grpo", "clip": Clip(low=low, high=0.28), "max_tokens": MAX_TOKENS, **fields})
    assert not list(task.check())
    given = inputs()
    value, gradient = policy_loss_of(task, given)
    expected, expected_gradient = trl_loss(task, given)
    assert value == pytest.approx(expected, rel=1e-5, abs=1e-6)
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-5, atol=1e-6)


@pytest.mark.parity
def test_rloo_is_that_of_trl() -> None:
    torch = import_optional("torch", extra="parity")
    trl = import_optional("trl", extra="parity")
    task = GrpoTask(name="grpo", loss=PolicyLoss.rloo, clip=Clip(low=0.1, high=0.1), importance_cap=None)
    given = inputs(2)
    tensors = {name: torch.tensor(value, dtype=torch.float64) for name, value in given.items()}
    new = tensors["new"].clone().requires_grad_()
    trainer: Any = trl.RLOOTrainer.__new__(trl.RLOOTrainer)
    accelerator = SimpleNamespace(reduce=lambda x, reduction: x, gather=lambda x: x)
    vars(trainer).update(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        aux_loss_enabled=False,
        epsilon_low=task.clip.low,
        epsilon_high=task.clip.high,
        accelerator=accelerator,
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros((B, S), dtype=torch.long)
    batch = dict.fromkeys(("prompt_ids", "prompt_mask", "completion_ids"), ids)
    old = (tensors["old"] * tensors["mask"]).sum(1)
    loss = trainer._compute_loss(
        None, {**batch, "completion_mask": tensors["mask"], "advantages": tensors["advantages"], "old_logps": old}
    )
    loss.backward()
    value, gradient = policy_loss_of(task, given)
    assert 0 < np.count_nonzero((gradient == 0).all(1)) < B, "some completions are clipped"
    assert value == pytest.approx(loss.item(), rel=1e-5)
    np.testing.assert_allclose(gradient, new.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_gspo_token_by_its_formula() -> None:
    """s_i,t = sg[s_i] pi / sg[pi]: clipped per completion, with the gradient and advantage of each token."""
    task = GrpoTask(
        name="grpo", loss=PolicyLoss.gspo, clip=Clip(low=0.05, high=0.05), importance_cap=1.1, importance=TOKENS
    )
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


@pytest.mark.slow
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
    task = GrpoTask(name="grpo", loss=kind, kl=Kl(beta=0.1), max_tokens=MAX_TOKENS)
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


REWARDS = np.array([[1.0, 0.0, 0.0, 1.0], [0.3, 0.3, 0.3, 0.3], [0.0, 0.0, 0.0, 2.0]])


def row_advantages(task: GrpoTask, rewards: np.ndarray = REWARDS) -> np.ndarray:
    """[P, G]: advantages that are equal for all tokens of a completion."""
    found = advantages(rewards, np.ones((rewards.size, 2)), task)
    assert (found[:, 0] == found[:, 1]).all()
    return found[:, 0].reshape(rewards.shape)


def test_advantages_are_those_of_the_formula() -> None:
    torch = import_optional("torch", extra="parity")
    centred = REWARDS - REWARDS.mean(1, keepdims=True)
    group = torch.tensor(REWARDS).std(dim=1, keepdim=True).numpy() + 1e-4
    whole = float(torch.tensor(REWARDS).std()) + 1e-4
    expected = {Scale.group: centred / group, Scale.batch: centred / whole, Scale.none: centred}
    for scale, values in expected.items():
        np.testing.assert_allclose(row_advantages(GrpoTask(name="grpo", scale=scale)), values, atol=1e-6)
    assert is_degenerate(REWARDS).tolist() == [False, True, False]
    assert not is_degenerate(REWARDS, Baseline.batch).any()
    assert not row_advantages(GrpoTask(name="grpo"), np.full((2, 3), 0.1)).any()
    assert scale_of(GrpoTask(name="grpo")) is Scale.group
    assert scale_of(GrpoTask(name="grpo", loss=PolicyLoss.dr_grpo)) is Scale.none
    assert scale_of(GrpoTask(name="grpo", loss=PolicyLoss.dr_grpo, scale=Scale.batch)) is Scale.batch


def test_advantages_of_rloo_with_a_penalty_in_the_reward() -> None:
    """r - beta sum(kl), minus the mean of the other completions (Ahmadian et al., 2024)."""
    task = GrpoTask(name="grpo", loss=PolicyLoss.rloo, kl=Kl(beta=0.05))
    random = np.random.default_rng(0)
    mask = (np.arange(S) < random.integers(1, S + 1, REWARDS.size)[:, None]).astype(float)
    log_ratio = random.standard_normal(mask.shape)
    net = REWARDS - 0.05 * (log_ratio * mask).sum(1).reshape(REWARDS.shape)
    others = np.stack([[np.delete(group, index).mean() for index in range(len(group))] for group in net])
    found = advantages(REWARDS, mask, task, log_ratio)
    np.testing.assert_allclose(found[:, 0].reshape(REWARDS.shape), net - others, atol=1e-6)


def test_advantages_of_reinforce_pp() -> None:
    """Returns to go with a penalty per token, whitened over the tokens of the batch (Hu et al., 2025)."""
    task = GrpoTask(name="grpo", loss=PolicyLoss.reinforce_pp, kl=Kl(beta=0.05))
    random = np.random.default_rng(1)
    lengths = random.integers(1, S + 1, REWARDS.size)
    mask = (np.arange(S) < lengths[:, None]).astype(float)
    log_ratio = random.standard_normal(mask.shape)
    token_rewards = -0.05 * log_ratio * mask
    token_rewards[np.arange(len(mask)), lengths - 1] += REWARDS.ravel()
    returns = np.zeros_like(mask)
    running = np.zeros(len(mask))
    for position in reversed(range(S)):
        running = token_rewards[:, position] + running
        returns[:, position] = running
    tokens = returns[mask > 0]
    expected = (returns - tokens.mean()) / np.sqrt(tokens.var(ddof=1))
    found = advantages(REWARDS, mask, task, log_ratio)
    np.testing.assert_allclose(found[mask > 0], expected[mask > 0], rtol=1e-3)


def verl_gae(rewards: Any, values: Any, mask: Any, gamma: float, lam: float) -> tuple[Any, Any]:
    """verl's compute_gae_advantage_return, transcribed."""
    import torch

    next_values, last, reversed_advantages = 0, 0, []
    for t in reversed(range(rewards.shape[-1])):
        delta = rewards[:, t] + gamma * next_values - values[:, t]
        candidate = delta + gamma * lam * last
        next_values = values[:, t] * mask[:, t] + (1 - mask[:, t]) * next_values
        last = candidate * mask[:, t] + (1 - mask[:, t]) * last
        reversed_advantages.append(last)
    advantages = torch.stack(reversed_advantages[::-1], dim=1)
    return advantages, advantages + values


@pytest.mark.parametrize(("discount", "trace"), [(1.0, 0.95), (0.97, 0.8), (1.0, 1.0)])
def test_advantages_of_a_critic(discount: float, trace: float) -> None:
    """Tokens of an environment in the middle of an episode are skipped; one row has no tokens at all."""
    torch = import_optional("torch", extra="parity")
    critic = Critic(discount=discount, trace=trace)
    task = GrpoTask(name="grpo", baseline=Baseline.critic, critic=critic, kl=Kl(beta=0.05))
    random = np.random.default_rng(2)
    mask = (random.random((REWARDS.size, S)) < 0.7).astype(np.float32)
    mask[3] = 0
    log_ratio, values = random.standard_normal(mask.shape), random.standard_normal(mask.shape).astype(np.float32)
    token_rewards = -0.05 * log_ratio * mask
    for row, reward in enumerate(REWARDS.ravel()):
        if mask[row].any():
            token_rewards[row, np.flatnonzero(mask[row])[-1]] += reward
    tensors = [torch.tensor(np.asarray(x, np.float64)) for x in (token_rewards, values, mask)]
    advantages_, returns = verl_gae(*tensors, discount, trace)
    tokens = advantages_[tensors[2] > 0]
    expected = (advantages_ - tokens.mean()) / (tokens.std() + 1e-4)
    found, found_returns = critic_advantages(REWARDS, values, mask, task, log_ratio)
    np.testing.assert_allclose(found[mask > 0], expected.numpy()[mask > 0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found_returns[mask > 0], returns.numpy()[mask > 0], rtol=1e-5, atol=1e-5)
    unscaled = critic_advantages(REWARDS, values, mask, dataclasses.replace(task, scale=Scale.none), log_ratio)[0]
    np.testing.assert_allclose(unscaled[mask > 0], (advantages_ - tokens.mean()).numpy()[mask > 0], atol=1e-5)


@pytest.mark.parametrize("clip", [0.2, None])
def test_the_value_loss_is_that_of_verl_and_trl(clip: float | None) -> None:
    """0.5 max((v - R)^2, (clip(v, old - c, old + c) - R)^2), a mean over tokens; values and gradients."""
    torch = import_optional("torch", extra="parity")
    random = np.random.default_rng(3)
    new, old, returns = (random.standard_normal((B, S)) for _ in range(3))
    old = new + 0.3 * old
    mask = inputs()["mask"]
    tensors = [torch.tensor(x) for x in (new, old, returns, mask)]
    tensors[0].requires_grad_()
    losses = (tensors[0] - tensors[2]) ** 2
    if clip is not None:
        clipped = torch.clamp(tensors[0], tensors[1] - clip, tensors[1] + clip)
        losses = torch.max(losses, (clipped - tensors[2]) ** 2)
    expected = 0.5 * (losses * tensors[3]).sum() / tensors[3].sum()
    expected.backward()
    arrays = [jnp.asarray(x, jnp.float32) for x in (new, old, returns, mask)]
    value, gradient = jax.value_and_grad(value_loss)(*arrays, clip)
    np.testing.assert_allclose(value, expected.item(), rtol=1e-5)
    np.testing.assert_allclose(gradient, tensors[0].grad.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_entropy_of_scored_tokens() -> None:
    random = np.random.default_rng(0)
    logits, targets = random.standard_normal((2, 3, 7)), random.integers(0, 7, (2, 3))
    torch = import_optional("torch", extra="parity")
    distribution = torch.distributions.Categorical(logits=torch.tensor(logits))
    logprobs, entropy = logprobs_and_entropy(jnp.asarray(logits), jnp.asarray(targets))
    np.testing.assert_allclose(logprobs, distribution.log_prob(torch.tensor(targets)), rtol=1e-5)
    np.testing.assert_allclose(entropy, distribution.entropy(), rtol=1e-5)


INVALID = [
    ({"loss": PolicyLoss.cispo, "clip": Clip(low=0.1)}, "clip.low"),
    ({"loss": PolicyLoss.cispo, "clip": Clip(dual=3.0)}, "clip.dual"),
    ({"kl": Kl(in_reward=True)}, "kl.in_reward"),
    ({"loss": PolicyLoss.rloo, "kl": Kl(beta=0.1, estimator=KlEstimator.k2)}, "kl.estimator"),
    ({"importance_cap": None, "importance": TOKENS}, "importance"),
    ({"importance_floor": 3.0}, "importance_floor"),
    ({"loss": PolicyLoss.rloo, "importance": TOKENS}, "importance"),
    ({"baseline": Baseline.batch, "scale": Scale.group}, "scale"),
    ({"baseline": Baseline.critic, "scale": Scale.group}, "scale"),
    ({"baseline": Baseline.critic, "loss": PolicyLoss.rloo}, "baseline"),
    ({"group_size": 1}, "group_size"),
    ({"critic": Critic(trace=1.0)}, "critic.trace"),
    ({"rollout_devices": 0.5}, "rollout_devices"),
    ({"max_staleness": 1, "rounds": 2}, "rounds"),
    ({"max_staleness": 1, "off_policy_steps": 1}, "off_policy_steps"),
    ({"max_staleness": 1, "importance_cap": None}, "importance_cap"),
    ({"max_staleness": 1, "engine": Engine(deterministic=True)}, "engine.deterministic"),
]


@pytest.mark.parametrize(("fields", "path"), INVALID)
def test_keys_without_effect_are_rejected(fields: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in GrpoTask(name="grpo", **fields).check()] == [path]
