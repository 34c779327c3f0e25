"""Online DPO: which completions form a pair, and the loss of a batch against TRL's formula."""

from typing import Any

import jax
import numpy as np
import pytest

from maxhydra.align.loss import PairScorer, preference_loss
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.policy import Kl, PolicyLoss
from maxhydra.config.schema.tasks.training import GrpoTask, Reference, preference_of
from maxhydra.model import build
from maxhydra.rl.batches import make_logprob_fn
from maxhydra.rl.episodes import Episode
from maxhydra.rl.pairs import choose_pair, interleaved_rows, pair_columns
from maxhydra.rl.reward_pool import RewardResult
from maxhydra.rl.rollout import Group
from maxhydra.sharding import Sharder, build_mesh
from maxhydra.train import Scorer
from tests.support.cli import SMALL

BETA = 0.3
DPO = GrpoTask(name="grpo", loss=PolicyLoss.dpo, kl=Kl(beta=BETA), mask_truncated=True)


def group(*rewards: float, **fields: Any) -> Group:
    """Completions of a prompt with the given rewards and random tokens; `fields` belong to the first."""
    rng = np.random.default_rng(len(rewards))
    episodes = []
    for index, length in enumerate(rng.integers(1, 5, len(rewards))):
        ids = rng.integers(1, 200, length).tolist()
        others = {"finish": "stop", **(fields if index == 0 else {})}
        episodes.append(Episode((4, 5, 6), ids, [-1.0] * length, [True] * length, **others))
    return Group(episodes, [RewardResult({}, reward, is_correct=False, errors=0) for reward in rewards])


def test_a_pair_is_the_best_and_the_worst_completion() -> None:
    assert choose_pair(group(0.5, 1.0, 0.0, 1.0, 0.0), DPO) == (1, 2)
    assert choose_pair(group(0.5, 0.5), DPO) is None
    # The first is the best, but was cut; its environment failed.
    assert choose_pair(group(9.0, 1.0, 0.0), DPO) == (0, 2)
    assert choose_pair(group(9.0, 1.0, 0.0, finish="length"), DPO) == (1, 2)
    assert choose_pair(group(9.0, 1.0, 0.0, failure="raised"), DPO) == (1, 2)
    assert choose_pair(group(9.0, 1.0, finish="length"), DPO) is None


@pytest.mark.exhaustive
def test_the_loss_is_that_of_trl() -> None:
    """OnlineDPOTrainer.training_step in NumPy, from the log-probs of policy and reference of every token."""
    config = compose(SMALL).config
    model, sharder = build(config.model), Sharder.from_config(config.mesh, build_mesh(config.mesh, jax.devices()[:1]))
    weights, reference = (jax.jit(model.init)(jax.random.key(seed)) for seed in (0, 1))
    groups = [group(0.0, 1.0), group(2.0, 1.0, 3.0), group(1.0, 1.0), group(5.0, 4.0, 0.0, 1.0)]
    pairs = [choose_pair(each, DPO) for each in groups]
    assert pairs == [(1, 0), (2, 1), None, (0, 2)]
    scorer = Scorer(model, sharder, 0)
    rows = interleaved_rows(groups, pairs, DPO, 8)
    rows |= make_logprob_fn(scorer, DPO, parts=2)({**weights, "reference": reference}, rows)
    loss = preference_loss(PairScorer(model, sharder, 0), preference_of(DPO), Reference.cached)
    sums = loss(weights, pair_columns(jax.device_get(rows)), None)

    def completion_logprob(tree: Any, episode: Episode) -> float:
        ids = np.array([[*episode.prompt, *episode.tokens]], np.int32)
        batch = {"tokens": ids[:, :-1], "targets": ids[:, 1:], "positions": np.arange(ids.shape[1] - 1)[None]}
        return float(np.asarray(scorer(tree, batch, None, is_adapted=True))[0, len(episode.prompt) - 1 :].sum())

    losses, margins = [], []
    for each, pair in zip(groups, pairs, strict=True):
        if pair is None:
            continue
        policy_logratio, reference_logratio = (
            completion_logprob(tree, each.episodes[pair[0]]) - completion_logprob(tree, each.episodes[pair[1]])
            for tree in (weights, reference)
        )
        logits = policy_logratio - reference_logratio
        losses.append(np.log1p(np.exp(-BETA * logits)))
        margins.append(BETA * logits)
    assert float(sums["weight"]) == 3
    np.testing.assert_allclose(float(sums["loss"]), sum(losses), rtol=1e-5)
    np.testing.assert_allclose(float(sums["reward_margin"]), sum(margins), rtol=1e-5, atol=1e-5)


def test_keys_of_policy_gradients_are_rejected() -> None:
    unused = ["task.clip.high=0.3", "task.importance_cap=null", "task.entropy_bonus=0.1", "task.kl.estimator=k1"]
    with pytest.raises(ConfigError) as caught:
        compose(["task=grpo", "task.loss=dpo", "task.baseline=batch", *unused])
    paths = {problem.path for problem in caught.value.problems}
    names = ("clip.high", "importance_cap", "entropy_bonus", "kl.estimator", "baseline", "kl.beta")
    assert paths == {f"task.{name}" for name in names}
