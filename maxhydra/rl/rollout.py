"""Rollouts: sample completions of prompts, compute their rewards, and arrange them as arrays.

The decode engine samples from the policy with the trainer's current weights.

P prompts, G completions of each, S positions.
"""

import base64
import dataclasses
import io
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.reward import Reward
from maxhydra.config.schema.tasks.training import GrpoTask, baseline_of
from maxhydra.data import Loader, Row
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import reject_stages
from maxhydra.decode.request import Completion
from maxhydra.decode.sampling_params import PromptEncoder, make_requests
from maxhydra.model import ModelDef
from maxhydra.rl.advantages import is_degenerate
from maxhydra.rl.reward_pool import RewardPool, RewardResult
from maxhydra.rl.rewards import Sample, extract_answer
from maxhydra.runtime.channel import broadcast, is_main
from maxhydra.sharding import Sharder
from maxhydra.train.loss import Tree


class PolicyEngine:
    """Samples completions. It uses the weights only during a call; the trainer may donate them afterwards.

    On the trainer's mesh the weights are used in place, on another mesh they are resharded; a single CPU keeps its own
    copy in the engine's weight layout.
    """

    def __init__(self, model: ModelDef, prompts: PromptEncoder, config: EngineConfig, *, sharder: Sharder, seed: int):
        self._model, self._prompts, self._config, self._sharder = model, prompts, config, sharder
        self._seed = seed
        model.check_mesh(sharder)
        reject_stages(sharder, "task.rollout_mesh")
        self._shardings = sharder.tree(model.axes)
        self._engine: Engine | None = None
        # Rollouts in a background thread and evaluations take turns.
        self._lock = threading.Lock()

    def generate(
        self, weights: Tree, prompts: Sequence[Sequence[int]], sampling: Sampling, *, samples: int, number: int
    ) -> list[list[Completion]]:
        """`samples` completions per prompt; seeds derive from `number`, the index of the first prompt in the run.

        A collective call, in which process 0 submits the prompts.
        """
        requests = [
            dataclasses.replace(request, stream=False)
            for index, prompt in enumerate(prompts)
            for request in make_requests(
                prompt, sampling, samples=samples, seed=self._seed, number=number + index, logprobs=0
            )
        ]
        with self._lock:
            engine = self._engine_with(weights)
            completions = [handle.result() for handle in engine.submit_all(requests if is_main() else [])]
            engine.synchronize()
        completions = broadcast(
            completions,
            encode=lambda items: [item.to_json() for item in items],
            decode=lambda items: [Completion.from_json(item) for item in items],
        )
        failed = next((item for item in completions if item.finish in ("error", "cancelled")), None)
        if failed is not None:
            raise RuntimeError(f"sampling a completion failed: {failed.error or failed.finish}")
        return [completions[start : start + samples] for start in range(0, len(completions), samples)]

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()

    def _engine_with(self, weights: Tree) -> Engine:
        weights = jax.device_put(weights, self._shardings)
        if self._engine is None:
            self._engine = Engine(
                self._model,
                weights,
                self._prompts.tokenizer,
                self._config,
                sharder=self._sharder,
                eos=self._prompts.eos_ids,
            )
        else:
            self._engine.update_params(weights)
        return self._engine


@dataclasses.dataclass(frozen=True)
class Group:
    """A prompt, its completions and their rewards."""

    prompt: tuple[int, ...]
    completions: list[Completion]
    results: list[RewardResult]
    info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Text, answer and record of the prompt."""
    number: int = 0
    """Index of the prompt in the run, from which the seeds of its completions derive; negative in evaluations."""

    @property
    def rewards(self) -> list[float]:
        return [result.reward for result in self.results]

    @property
    def is_degenerate(self) -> bool:
        return bool(is_degenerate(np.array([self.rewards]))[0])

    def records(self) -> Iterator[dict[str, Any]]:
        """The completions as lines of the run's rollouts; see record/rollout_store.py."""
        for sample, (completion, result) in enumerate(zip(self.completions, self.results, strict=True)):
            yield {
                "prompt_number": self.number,
                "sample": sample,
                "prompt": self.info.get("prompt"),
                "completion": completion.text,
                "expected": as_text(self.info.get("answer")),
                "reward": result.reward,
                "terms": result.terms,
                "is_correct": result.is_correct,
                "errors": result.errors,
                "tokens": len(completion.tokens),
                "finish": completion.finish,
            }


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

    def __init__(self, engine: PolicyEngine, reward_pool: RewardPool, task: GrpoTask, reward: Reward):
        self.task = task
        self._engine, self._reward_pool, self._reward = engine, reward_pool, reward

    def sample_groups(
        self, weights: Tree, rows: Sequence[Row], *, samples: int, temperature: float, number: int
    ) -> list[Group]:
        """Completions of the prompts in `rows`, with their rewards."""
        prompts = [tuple(row["tokens"][: int(row["length"])].tolist()) for row in rows]
        sampling = unfiltered_sampling(self.task.max_tokens, temperature)
        completions = self._engine.generate(weights, prompts, sampling, samples=samples, number=number)
        reward_inputs = [
            self._reward_input(row["info"].item(), completion)
            for row, group in zip(rows, completions, strict=True)
            for completion in group
        ]
        results = self._reward_pool.score(reward_inputs)
        return [
            Group(prompt, group, results[index * samples : (index + 1) * samples], row["info"].item(), number + index)
            for index, (prompt, group, row) in enumerate(zip(prompts, completions, rows, strict=True))
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

    def _reward_input(self, info: dict[str, Any], completion: Completion) -> Sample:
        return Sample(
            prompt=info["prompt"],
            text=completion.text,
            answer=extract_answer(completion.text, self._reward.answer),
            expected=info["answer"],
            record=info["record"],
            tokens=len(completion.tokens),
        )


def unfiltered_sampling(max_tokens: int, temperature: float) -> Sampling:
    """Sampling from the full distribution, without top-k, top-p, min-p or penalties."""
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


def as_text(value: Any) -> str | None:
    return None if value is None else str(value)


def columns(groups: Sequence[Group], task: GrpoTask, seq_len: int) -> dict[str, np.ndarray]:
    """Arrays with one row per completion; a token's weight and log-prob are at the position that predicts it."""
    weights = row_weights(groups, task)
    rows = [(group.prompt, completion) for group in groups for completion in group.completions]
    arrays = {name: np.zeros((len(rows), seq_len), np.int32) for name in ("tokens", "targets", "positions")}
    arrays |= {name: np.zeros((len(rows), seq_len), np.float32) for name in ("weights", "sampled_logprobs")}
    for index, (prompt, completion) in enumerate(rows):
        ids = np.array([*prompt, *completion.tokens], np.int32)
        predicted = slice(len(prompt) - 1, len(ids) - 1)
        arrays["tokens"][index, : len(ids) - 1] = ids[:-1]
        arrays["targets"][index, : len(ids) - 1] = ids[1:]
        arrays["positions"][index, : len(ids) - 1] = np.arange(len(ids) - 1)
        arrays["weights"][index, predicted] = weights[index]
        arrays["sampled_logprobs"][index, predicted] = [token.logprob for token in completion.logprobs]
    return arrays


def row_weights(groups: Sequence[Group], task: GrpoTask) -> np.ndarray:
    """[B]: 0 for completions that task.mask_degenerate and task.mask_truncated exclude, else 1."""
    weights = np.ones((len(groups), task.group_size))
    if task.mask_degenerate:
        weights[is_degenerate(np.array([group.rewards for group in groups]), baseline_of(task))] = 0
    if task.mask_truncated:
        weights *= [[completion.finish != "length" for completion in group.completions] for group in groups]
    return weights.ravel()


def metrics(groups: Sequence[Group], batch_size: int, task: GrpoTask) -> dict[str, float]:
    """Metrics over all sampled groups, of which the first `batch_size` are trained on."""
    results = [result for group in groups for result in group.results]
    completions = [completion for group in groups for completion in group.completions]
    rewards = np.array([group.rewards for group in groups])
    term_means = {name: np.mean([result.terms[name] for result in results]) for name in results[0].terms}
    values = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        **{f"reward/term/{name}": mean for name, mean in term_means.items()},
        "reward/errors": sum(result.errors for result in results),
        "answers/right": np.mean([result.is_correct for result in results]),
        "answers/tokens": np.mean([len(completion.tokens) for completion in completions]),
        "answers/truncated": np.mean([completion.finish == "length" for completion in completions]),
        "groups/degenerate": is_degenerate(rewards, baseline_of(task)).mean(),
        "groups/drawn": len(groups) / batch_size,
    }
    return {name: float(value) for name, value in values.items()}
