"""How many held-out prompts are answered rightly: at the first try, in k tries, by a majority of k."""

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import numpy as np

from maxhydra.config.schema.reward import Reward
from maxhydra.data import Row
from maxhydra.rl.loss import own_weights
from maxhydra.rl.rewards import extract_answer, normalised
from maxhydra.rl.rollout import Group, RolloutWorker
from maxhydra.train.objectives import Evaluate
from maxhydra.train.state import TrainState


def held_out_answers(
    rollouts: RolloutWorker, batches: Callable[[], Iterator[list[Row]]], reward: Reward, *, limit: int
) -> Evaluate | None:
    """Measures on the first `limit` batches of held-out prompts. None: a limit of 0.

    `eval/error` is 1 - eval/pass@1, for checkpoint.best_metric, which is the better the smaller.
    """
    asked = rollouts.task.evaluation

    def evaluate(state: TrainState) -> dict[str, float]:
        # A row that fills up the last batch has no prompt.
        held_out = [row for batch in islice(batches(), limit) for row in batch if row["length"]]
        # Numbers below 0 are no prompt's in training: other seeds, and the same ones at every evaluation.
        groups = rollouts.groups(
            own_weights(state.weights),
            held_out,
            samples=asked.samples,
            temperature=asked.temperature,
            number=-len(held_out),
        )
        return measured(groups, asked.samples, reward)

    return evaluate if limit else None


def measured(groups: Sequence[Group], samples: int, reward: Reward) -> dict[str, float]:
    """Means over prompts."""
    right = [[verdict.is_right for verdict in group.verdicts] for group in groups]
    ks = sorted({samples, *(2**power for power in range(samples.bit_length()))})
    passes = {f"eval/pass@{k}": float(np.mean([pass_at(k, sum(one), samples) for one in right])) for k in ks}
    found = {
        "eval/reward": float(np.mean([group.rewards for group in groups])),
        "eval/tokens": float(np.mean([len(answer.tokens) for group in groups for answer in group.answers])),
        "eval/prompts": float(len(groups)),
        "eval/error": 1 - passes["eval/pass@1"],
        **passes,
    }
    if samples > 1:
        texts = [[extract_answer(answer.text, reward.answer) for answer in group.answers] for group in groups]
        found[f"eval/maj@{samples}"] = float(np.mean([majority(*one) for one in zip(texts, right, strict=True)]))
    return found


def pass_at(k: int, right: int, samples: int) -> float:
    """Chance that one of k answers is right, when `right` of `samples` were: 1 - C(n - c, k) / C(n, k) (Chen et al.,
    2021)."""
    return 1 - math.comb(samples - right, k) / math.comb(samples, k)


def majority(answers: Sequence[str | None], right: Sequence[bool]) -> float:
    """Whether the answer given most often is right; the mean over those that tie. Texts without one do not vote."""
    votes = Counter(normalised(answer) for answer in answers if answer is not None)
    most = max(votes.values(), default=0)
    winners = [answer for answer, count in votes.items() if count == most]
    verdicts = {normalised(answer): one for answer, one in zip(answers, right, strict=True) if answer is not None}
    return sum(verdicts[winner] for winner in winners) / max(len(winners), 1)
