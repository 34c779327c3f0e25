"""A batch of answers: prompts drawn, answered, judged, and laid out as arrays.

P prompts, G answers to each, S places.
"""

import base64
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.reward import Reward
from maxhydra.config.schema.tasks.grpo import GrpoTask
from maxhydra.data import Loader, Row
from maxhydra.decode.request import Completion
from maxhydra.rl.advantages import advantages, is_degenerate, scale_of
from maxhydra.rl.policy_engine import Sampler
from maxhydra.rl.reward_pool import RewardPool, RewardResult
from maxhydra.rl.rewards import Sample, extract_answer
from maxhydra.train.state import Tree


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt and its answers."""

    prompt: tuple[int, ...]
    answers: list[Completion]
    verdicts: list[RewardResult]

    @property
    def rewards(self) -> list[float]:
        return [verdict.reward for verdict in self.verdicts]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """What a batch is trained on, on the host: columns [P * G, S], and what is worth logging of it."""

    columns: dict[str, np.ndarray]
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        packed = io.BytesIO()
        np.savez_compressed(packed, **self.columns)  # type: ignore[arg-type]
        return {"columns": base64.b64encode(packed.getvalue()).decode(), "metrics": self.metrics}

    @classmethod
    def from_json(cls, kept: dict[str, Any]) -> "Rollout":
        with np.load(io.BytesIO(base64.b64decode(kept["columns"])), allow_pickle=False) as columns:
            return cls(dict(columns), dict(kept["metrics"]))


class RolloutWorker:
    """Writes and judges answers, for training and for evaluation."""

    def __init__(self, sampler: Sampler, judge: RewardPool, task: GrpoTask, reward: Reward):
        self.task = task
        self._sampler, self._judge, self._reward = sampler, judge, reward

    def groups(
        self, weights: Tree, rows: Sequence[Row], *, samples: int, temperature: float, number: int
    ) -> list[Group]:
        """Answers to the prompts of rows, and what they are worth."""
        prompts = [tuple(row["tokens"][: int(row["length"])].tolist()) for row in rows]
        sampling = unfiltered_sampling(self.task.max_tokens, temperature)
        answers = self._sampler.answers(weights, prompts, sampling, samples=samples, number=number)
        told = [self._told(row["info"].item(), one) for row, group in zip(rows, answers, strict=True) for one in group]
        verdicts = self._judge.score(told)
        return [
            Group(prompt, group, verdicts[index * samples : (index + 1) * samples])
            for index, (prompt, group) in enumerate(zip(prompts, answers, strict=True))
        ]

    def draw(self, weights: Tree, loader: Loader[list[Row]], *, seq_len: int, number: int) -> tuple[Rollout, int]:
        """A batch of groups, as many as the loader gives prompts at a time, and how many prompts it took.

        Answers are drawn from the model's own distribution, whose gradient the losses estimate. Groups from which
        nothing can be learned make room for others as long as task.rounds allows.
        """
        kept: list[Group] = []
        others: list[Group] = []
        wanted = drawn = 0
        for _ in range(self.task.rounds):
            rows = next(loader)
            wanted = len(rows)
            groups = self.groups(weights, rows, samples=self.task.group_size, temperature=1.0, number=number + drawn)
            drawn += wanted
            for group in groups:
                (others if is_degenerate(np.array([group.rewards]))[0] else kept).append(group)
            if len(kept) >= wanted:
                break
        chosen = [*kept, *others][:wanted]
        return Rollout(columns(chosen, self.task, seq_len), metrics([*kept, *others], chosen)), drawn

    def _told(self, info: dict[str, Any], answer: Completion) -> Sample:
        return Sample(
            prompt=info["prompt"],
            text=answer.text,
            answer=extract_answer(answer.text, self._reward.answer),
            expected=info["answer"],
            record=info["record"],
            tokens=len(answer.tokens),
        )


def unfiltered_sampling(max_tokens: int, temperature: float) -> Sampling:
    """Draws that leave out nothing of what the model might say."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        seed=None,
        stop=[],
    )


def columns(groups: Sequence[Group], task: GrpoTask, seq_len: int) -> dict[str, np.ndarray]:
    """Arrays with a row for each answer; the place before a token is where it is predicted."""
    rewards_PG = np.array([group.rewards for group in groups])
    worth = advantages(rewards_PG, scale_of(task)).ravel()
    counts = ~is_degenerate(rewards_PG).repeat(task.group_size) if task.mask_degenerate else np.ones(len(worth))
    rows = [(group.prompt, answer) for group in groups for answer in group.answers]
    made = {name: np.zeros((len(rows), seq_len), np.int32) for name in ("tokens", "targets", "positions")}
    made |= {name: np.zeros((len(rows), seq_len), np.float32) for name in ("weights", "sampled_logprobs")}
    for index, (prompt, answer) in enumerate(rows):
        ids = np.array([*prompt, *answer.tokens], np.int32)
        place = slice(len(prompt) - 1, len(ids) - 1)
        made["tokens"][index, : len(ids) - 1] = ids[:-1]
        made["targets"][index, : len(ids) - 1] = ids[1:]
        made["positions"][index, : len(ids) - 1] = np.arange(len(ids) - 1)
        made["weights"][index, place] = counts[index]
        made["sampled_logprobs"][index, place] = [one.logprob for one in answer.logprobs]
    return {**made, "advantages": np.broadcast_to(worth[:, None], (len(rows), seq_len)).copy()}


def metrics(drawn: Sequence[Group], chosen: Sequence[Group]) -> dict[str, float]:
    """Of all groups that were drawn, whether they are trained on or not."""
    verdicts = [verdict for group in drawn for verdict in group.verdicts]
    answers = [answer for group in drawn for answer in group.answers]
    rewards = np.array([group.rewards for group in drawn])
    by_term = {name: np.mean([verdict.terms[name] for verdict in verdicts]) for name in verdicts[0].terms}
    found = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        **{f"reward/term/{name}": mean for name, mean in by_term.items()},
        "reward/errors": sum(verdict.errors for verdict in verdicts),
        "answers/right": np.mean([verdict.is_right for verdict in verdicts]),
        "answers/tokens": np.mean([len(answer.tokens) for answer in answers]),
        "answers/truncated": np.mean([answer.finish == "length" for answer in answers]),
        "groups/degenerate": is_degenerate(rewards).mean(),
        "groups/drawn": len(drawn) / len(chosen),
    }
    return {name: float(value) for name, value in found.items()}
