"""Rollouts: sample episodes of prompts, compute their rewards, and arrange them as arrays.

The decode engine samples from the policy with the trainer's current weights. An episode is a completion of the prompt,
or several turns with an environment (episodes.py).

P prompts, G episodes of each, S positions.
"""

import base64
import dataclasses
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.reward import Reward
from maxhydra.config.schema.tasks.training import GrpoTask, baseline_of
from maxhydra.data import Loader, Row
from maxhydra.layers.context import EXPERTS
from maxhydra.rl.advantages import is_degenerate
from maxhydra.rl.environment_process import FAILURES
from maxhydra.rl.episodes import Episode, EpisodeRunner
from maxhydra.rl.policy_engine import PolicyEngine
from maxhydra.rl.reward_pool import RewardPool, RewardResult
from maxhydra.rl.rewards import Sample, extract_answer
from maxhydra.train.loss import Tree


@dataclasses.dataclass(frozen=True)
class Group:
    """The episodes of a prompt and their rewards."""

    episodes: list[Episode]
    results: list[RewardResult]
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Text, answer and record of the prompt."""
    number: int = 0
    """Index of the prompt in the run, from which the seeds of its episodes derive; negative in evaluations."""

    @property
    def rewards(self) -> list[float]:
        """Rewards; an episode whose environment failed has the mean of the others, so that they keep their baseline."""
        valid = [
            result.reward for episode, result in zip(self.episodes, self.results, strict=True) if not episode.failure
        ]
        # Between them: rounding must not make equal rewards differ.
        mean = min(max(float(np.mean(valid)), min(valid)), max(valid)) if valid else 0.0
        return [
            mean if episode.failure else result.reward
            for episode, result in zip(self.episodes, self.results, strict=True)
        ]

    @property
    def is_degenerate(self) -> bool:
        return bool(is_degenerate(np.array([self.rewards]))[0])

    def records(self) -> Iterator[dict[str, Any]]:
        """The episodes as lines of the run's rollouts; see record/rollout_store.py."""
        for sample, (episode, result) in enumerate(zip(self.episodes, self.results, strict=True)):
            record = {
                "prompt_number": self.number,
                "sample": sample,
                "prompt": self.info.get("prompt"),
                "completion": episode.text if episode.transcript is None else episode.transcript,
                "expected": as_text(self.info.get("answer")),
                "reward": result.reward,
                "terms": result.terms,
                "is_correct": result.is_correct,
                "errors": result.errors,
                "tokens": episode.num_sampled,
                "finish": episode.finish,
            }
            if episode.reward is not None:
                record["turns"] = episode.turns
            if episode.scores:
                record["scores"] = episode.scores
            if episode.failure:
                record["failure"] = episode.failure
            yield record


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A batch on the host: columns [P * G, S], its metrics, and the records of all completions that were sampled."""

    columns: dict[str, np.ndarray]
    metrics: dict[str, float]
    records: list[dict[str, Any]] = dataclasses.field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        archive = io.BytesIO()
        np.savez_compressed(archive, **self.columns)  # type: ignore[arg-type]
        columns = base64.b64encode(archive.getvalue()).decode()
        return {"columns": columns, "metrics": self.metrics, "records": self.records}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Rollout":
        with np.load(io.BytesIO(base64.b64decode(content["columns"])), allow_pickle=False) as columns:
            # Checkpoints of earlier versions have no records.
            return cls(dict(columns), dict(content["metrics"]), list(content.get("records", [])))


class RolloutWorker:
    """Samples completions and computes their rewards, for training and for evaluation."""

    def __init__(
        self,
        engine: PolicyEngine,
        reward_pool: RewardPool,
        task: GrpoTask,
        reward: Reward,
        runner: EpisodeRunner | None = None,
    ):
        """`runner`: plays episodes with an environment, in process 0; None without an environment."""
        self.task, self.engine = task, engine
        self._reward_pool, self._reward, self._runner = reward_pool, reward, runner
        # One call at a time: the processes of the pool reply in order.
        self._scoring = threading.Lock()

    def sample_groups(
        self,
        weights: Tree | None,
        rows: Sequence[Row],
        *,
        samples: int,
        temperature: float,
        number: int,
        version: int = 0,
    ) -> list[Group]:
        """Episodes of the prompts in `rows`, with their rewards. None: with the weights that were pushed last."""
        prompts = [tuple(row["tokens"][: int(row["length"])].tolist()) for row in rows]
        infos: list[dict[str, Any]] = [row["info"].item() for row in rows]
        sampling = unfiltered_sampling(self.task.max_tokens, temperature)
        runner = self._runner
        if runner is None:
            episodes = self.engine.generate(weights, prompts, sampling, samples=samples, number=number, version=version)
        else:
            records = [{**info["record"], "prompt": info["messages"], "answer": info["answer"]} for info in infos]
            known = list(zip(prompts, records, strict=True))
            episodes = self.engine.run(
                weights,
                lambda engine: runner.run(engine, known, sampling, samples=samples, number=number),
                version=version,
            )
        inputs = [self._reward_input(infos[index // samples], episode) for index, episode in enumerate(episodes)]
        with self._scoring:
            scores = self._reward_pool.score(inputs, group_size=samples)
        results = [self._with_environment(result, episode) for result, episode in zip(scores, episodes, strict=True)]
        parts = [slice(index * samples, (index + 1) * samples) for index in range(len(rows))]
        return [
            Group(episodes[part], results[part], info, number + index)
            for index, (part, info) in enumerate(zip(parts, infos, strict=True))
        ]

    def sample_batch(self, weights: Tree, loader: Loader[list[Row]], *, number: int) -> tuple[list[Group], int]:
        """All groups that were sampled, and how many of them, the first ones, are a batch: one per prompt of a loader
        batch.

        Completions are sampled from the model's unmodified distribution, whose gradient the losses estimate. Degenerate
        groups are replaced by groups of further prompts, for up to task.rounds loader batches (dynamic sampling, DAPO).
        """
        informative: list[Group] = []
        degenerate: list[Group] = []
        batch_size = num_prompts = 0
        for _ in range(self.task.rounds):
            rows = next(loader)
            batch_size = len(rows)
            groups = self.sample_groups(
                weights, rows, samples=self.task.group_size, temperature=1.0, number=number + num_prompts
            )
            num_prompts += batch_size
            for group in groups:
                (degenerate if group.is_degenerate else informative).append(group)
            if len(informative) >= batch_size:
                break
        return [*informative, *degenerate], batch_size

    def _reward_input(self, info: dict[str, Any], episode: Episode) -> Sample:
        turns = {} if episode.reward is None else {"turns": episode.turns}
        return Sample(
            prompt=info["prompt"],
            text=episode.text,
            answer=extract_answer(episode.text, self._reward.answer),
            expected=info["answer"],
            record={**info["record"], **turns},
            tokens=episode.num_sampled,
            ids=(*episode.prompt, *episode.tokens),
        )

    def _with_environment(self, result: RewardResult, episode: Episode) -> RewardResult:
        """The result of an episode; 0 if its environment failed."""
        if episode.reward is None:
            return result
        if episode.failure:
            result = dataclasses.replace(result, terms=dict.fromkeys(result.terms, 0.0), reward=0.0, is_correct=False)
            return dataclasses.replace(result.with_environment(0.0, self._reward), is_correct=False)
        return result.with_environment(episode.reward, self._reward)


def unfiltered_sampling(max_tokens: int, temperature: float) -> Sampling:
    """Sampling from the full distribution, without top-k, top-p, min-p or penalties."""
    return Sampling(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        frequency_penalty=0.0,
        presence_penalty=0.0,
        seed=None,
        stop=[],
    )


def as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def columns(groups: Sequence[Group], task: GrpoTask, seq_len: int) -> dict[str, np.ndarray]:
    """Arrays with one row per episode; a token's weight and log-prob are at the position that predicts it.

    Tokens of the environment have weight 0. Experts [B, S, L, K] are those of the input tokens.
    """
    weights = row_weights(groups, task)
    episodes = [episode for group in groups for episode in group.episodes]
    arrays = {name: np.zeros((len(episodes), seq_len), np.int32) for name in ("tokens", "targets", "positions")}
    arrays |= {name: np.zeros((len(episodes), seq_len), np.float32) for name in ("weights", "sampled_logprobs")}
    for index, episode in enumerate(episodes):
        ids = np.array([*episode.prompt, *episode.tokens], np.int32)
        predicted = slice(len(episode.prompt) - 1, len(ids) - 1)
        arrays["tokens"][index, : len(ids) - 1] = ids[:-1]
        arrays["targets"][index, : len(ids) - 1] = ids[1:]
        arrays["positions"][index, : len(ids) - 1] = np.arange(len(ids) - 1)
        arrays["weights"][index, predicted] = weights[index] * np.array(episode.is_sampled)
        arrays["sampled_logprobs"][index, predicted] = episode.logprobs
    if task.router_replay:
        # An episode has none if its environment failed at once.
        shape = next(episode.experts.shape[1:] for episode in episodes if episode.experts is not None)
        arrays[EXPERTS] = np.full((len(episodes), seq_len, *shape), -1, np.int16)
        for row, episode in zip(arrays[EXPERTS], episodes, strict=True):
            experts = () if episode.experts is None else episode.experts
            row[: len(experts)] = np.reshape(experts, (len(experts), *shape))
    return arrays


def row_weights(groups: Sequence[Group], task: GrpoTask) -> np.ndarray:
    """[B]: 0 for episodes whose environment failed or that mask_degenerate and mask_truncated exclude, else 1."""
    weights = np.array([[float(not episode.failure) for episode in group.episodes] for group in groups])
    if task.mask_degenerate:
        weights[is_degenerate(np.array([group.rewards for group in groups]), baseline_of(task))] = 0
    if task.mask_truncated:
        weights *= [[episode.finish != "length" for episode in group.episodes] for group in groups]
    return weights.ravel()


def metrics(groups: Sequence[Group], batch_size: int, task: GrpoTask) -> dict[str, float]:
    """Metrics over all sampled groups, of which the first `batch_size` are trained on."""
    results = [result for group in groups for result in group.results]
    episodes = [episode for group in groups for episode in group.episodes]
    rewards = np.array([group.rewards for group in groups])
    term_means = {name: np.mean([result.terms[name] for result in results]) for name in results[0].terms}
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        **{f"reward/term/{name}": mean for name, mean in term_means.items()},
        "reward/errors": sum(result.errors for result in results),
        "answers/right": np.mean([result.is_correct for result in results]),
        "answers/tokens": np.mean([episode.num_sampled for episode in episodes]),
        "answers/truncated": np.mean([episode.finish == "length" for episode in episodes]),
        "groups/degenerate": is_degenerate(rewards, baseline_of(task)).mean(),
        "groups/drawn": len(groups) / batch_size,
    }
    if episodes[0].reward is not None:
        values |= {f"environment/{kind}": sum(episode.finish == kind for episode in episodes) for kind in FAILURES}
        for name in sorted({name for episode in episodes for name in episode.scores}):
            scores = [episode.scores[name] for episode in episodes if name in episode.scores]
            values[f"environment/score/{name}"] = np.mean(scores)
        values["environment/turns"] = np.mean([episode.num_turns for episode in episodes])
        values["environment/tool_calls"] = np.mean([episode.num_tool_calls for episode in episodes])
    return {name: float(value) for name, value in values.items()}
