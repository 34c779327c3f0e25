"""Rollouts: sample completions of prompts, compute their rewards, and arrange them as arrays.

The decode engine samples from the policy with the trainer's current weights.

P prompts, G completions of each, S positions.
"""

import base64
import dataclasses
import io
import threading
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.config.schema.decode import Engine as EngineConfig
from maxhydra.config.schema.decode import Sampling
from maxhydra.config.schema.reward import Reward
from maxhydra.config.schema.tasks.training import GrpoTask, PolicyLoss, Scale
from maxhydra.data import Loader, Row
from maxhydra.decode.engine import Engine
from maxhydra.decode.open import reject_stages
from maxhydra.decode.request import Completion
from maxhydra.decode.sampling_params import PromptEncoder, make_requests
from maxhydra.model import ModelDef
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

    @property
    def rewards(self) -> list[float]:
        return [result.reward for result in self.results]


@dataclasses.dataclass(frozen=True)
class Rollout:
    """A batch on the host: columns [P * G, S], and its metrics."""

    columns: dict[str, np.ndarray]
    metrics: dict[str, float]

    def to_json(self) -> dict[str, Any]:
        archive = io.BytesIO()
        np.savez_compressed(archive, **self.columns)  # type: ignore[arg-type]
        return {"columns": base64.b64encode(archive.getvalue()).decode(), "metrics": self.metrics}

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Rollout":
        with np.load(io.BytesIO(base64.b64decode(content["columns"])), allow_pickle=False) as columns:
            return cls(dict(columns), dict(content["metrics"]))


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
            Group(prompt, group, results[index * samples : (index + 1) * samples])
            for index, (prompt, group) in enumerate(zip(prompts, completions, strict=True))
        ]

    def sample_batch(
        self, weights: Tree, loader: Loader[list[Row]], *, seq_len: int, number: int
    ) -> tuple[Rollout, int]:
        """A batch with one group per prompt of a loader batch, and the number of prompts that were sampled.

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
                (degenerate if is_degenerate(np.array([group.rewards]))[0] else informative).append(group)
            if len(informative) >= batch_size:
                break
        groups = [*informative, *degenerate]
        selected = groups[:batch_size]
        return Rollout(columns(selected, self.task, seq_len), metrics(groups, selected)), num_prompts

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


def columns(groups: Sequence[Group], task: GrpoTask, seq_len: int) -> dict[str, np.ndarray]:
    """Arrays with one row per completion; a token's weight and log-prob are at the position that predicts it."""
    rewards_PG = np.array([group.rewards for group in groups])
    row_advantages = advantages(rewards_PG, scale_of(task)).ravel()
    weights = np.ones(len(row_advantages))
    if task.mask_degenerate:
        weights = ~is_degenerate(rewards_PG).repeat(task.group_size)
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
    return {**arrays, "advantages": np.broadcast_to(row_advantages[:, None], (len(rows), seq_len)).copy()}


def metrics(groups: Sequence[Group], selected: Sequence[Group]) -> dict[str, float]:
    """Metrics over all sampled groups, whether they were selected for training or not."""
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
        "groups/degenerate": is_degenerate(rewards).mean(),
        "groups/drawn": len(groups) / len(selected),
    }
    return {name: float(value) for name, value in values.items()}


# Added to the standard deviation, so that rounding differences between rewards do not become advantages.
EPSILON = 1e-4


def scale_of(task: GrpoTask) -> Scale:
    """task.scale, or the default of the loss."""
    return task.scale or (Scale.none if task.loss is PolicyLoss.dr_grpo else Scale.group)


def advantages(rewards_PG: np.ndarray, scale: Scale) -> np.ndarray:
    """Rewards minus their group mean, scaled as `scale` says; exactly 0 if all rewards of a group are equal."""
    centred = rewards_PG - rewards_PG.mean(axis=1, keepdims=True)
    if scale is Scale.group:
        centred = centred / (rewards_PG.std(axis=1, keepdims=True, ddof=1) + EPSILON)
    elif scale is Scale.batch:
        centred = centred / (rewards_PG.std(ddof=1) + EPSILON)
    return np.where(is_degenerate(rewards_PG)[:, None], 0.0, centred).astype(np.float32)


def is_degenerate(rewards_PG: np.ndarray) -> np.ndarray:
    """[P]: groups whose rewards are all equal, which give no learning signal."""
    return rewards_PG.max(axis=1) == rewards_PG.min(axis=1)
