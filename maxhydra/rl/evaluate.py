"""Evaluation on held-out prompts: pass@1, pass@k and majority vote."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from maxhydra.config.schema.reward import Reward
from maxhydra.data import Row
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.rl.rewards import extract_answer, normalize
from maxhydra.rl.rollout import Group, RolloutWorker
from maxhydra.rl.setup import policy_weights
from maxhydra.train.evaluate import Evaluate
from maxhydra.train.state import TrainState


def held_out_pass_rate(
    worker: RolloutWorker,
    batches: Callable[[], Iterator[list[Row]]],
    reward: Reward,
    *,
    limit: int,
    writer: RolloutWriter | None = None,
) -> Evaluate | None:
    """Evaluates a policy on the first `limit` batches of held-out prompts. None for a limit of 0.

    `eval/error` is 1 - eval/pass@1, because checkpoint.best_metric is minimized.
    """
    evaluation = worker.task.evaluation

    def evaluate(state: TrainState) -> dict[str, float]:
        # Padding rows of the last batch have length 0.
        held_out = [row for batch in islice(batches(), limit) for row in batch if row["length"]]
        # Negative prompt numbers do not occur in training: other seeds, and the same ones in every evaluation.
        groups = worker.sample_groups(
            policy_weights(state.weights),
            held_out,
            samples=evaluation.samples,
            temperature=evaluation.temperature,
            number=-len(held_out),
            version=int(state.step),
        )
        if writer is not None:
            writer.append(int(state.step), [record for group in groups for record in group.records()])
        return eval_metrics(groups, evaluation.samples, reward)

    return evaluate if limit else None


def eval_metrics(groups: Sequence[Group], samples: int, reward: Reward) -> dict[str, float]:
    """Means over prompts of reward, length, pass@k and majority vote."""
    is_correct = [[result.is_correct for result in group.results] for group in groups]
    ks = sorted({samples, *(2**power for power in range(samples.bit_length()))})
    passes = {f"eval/pass@{k}": float(np.mean([pass_at(k, sum(group), samples) for group in is_correct])) for k in ks}
    metrics = {
        "eval/reward": float(np.mean([group.rewards for group in groups])),
        "eval/tokens": float(np.mean([episode.num_sampled for group in groups for episode in group.episodes])),
        "eval/prompts": float(len(groups)),
        "eval/error": 1 - passes["eval/pass@1"],
        **passes,
    }
    if samples > 1:
        answers = [[extract_answer(episode.text, reward.answer) for episode in group.episodes] for group in groups]
        votes = [majority(*pair) for pair in zip(answers, is_correct, strict=True)]
        metrics[f"eval/maj@{samples}"] = float(np.mean(votes))
    return metrics


def pass_at(k: int, correct: int, samples: int) -> float:
    """Unbiased pass@k from `correct` of n `samples`: 1 - C(n - c, k) / C(n, k) (Chen et al., 2021)."""
    return 1 - math.comb(samples - correct, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], is_correct: Sequence[bool]) -> float:
    """Whether the most frequent answer is correct, averaged over ties. Completions without an answer do not vote."""
    votes = Counter(normalize(answer) for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    correctness = {
        normalize(answer): correct for answer, correct in zip(answers, is_correct, strict=True) if answer is not None
    }
    return sum(correctness[winner] for winner in winners) / max(len(winners), 1)
