"""A pool of processes that compute rewards, because reward code is user code that may raise, hang or crash."""

import dataclasses
import itertools
import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.reward import ENVIRONMENT, OnFault, Reward, RewardKind
from maxhydra.rl.reward_process import Call, LoadFailure, Score, SupervisorLink, supervise
from maxhydra.rl.rewards import Sample, unit_indices
from maxhydra.runtime.channel import broadcast, is_main

log = logging.getLogger("maxhydra")


class RewardError(Exception):
    """A term failed under reward.on_error=raise."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The reward of a completion: unweighted terms, weighted sum, correctness, and the number of failed terms."""

    terms: dict[str, float]
    reward: float
    is_correct: bool
    errors: int

    def with_environment(self, value: float, reward: Reward) -> "RewardResult":
        """The result with the environment's reward as one more term, of weight 1."""
        is_correct = value >= reward.pass_at if pass_term(reward) == ENVIRONMENT else self.is_correct
        return RewardResult({**self.terms, ENVIRONMENT: value}, self.reward + value, is_correct, self.errors)


def pass_term(reward: Reward) -> str:
    """The term that decides whether a completion is correct."""
    return reward.passes or next(iter(reward.terms), ENVIRONMENT)


# Scores of samples that are computed on the devices of the run, by all of its processes.
DeviceScorer = Callable[[Sequence[Sample]], list[Score]]


class RewardPool:
    """Scores completions. The constructor starts the processes; ConfigError if a term cannot be loaded.

    Of several processes of a run, only process 0 has workers: reward code may be random or depend on its host.
    """

    def __init__(self, reward: Reward, device_scorers: Mapping[str, DeviceScorer] | None = None):
        """`device_scorers`: those of the terms that reward processes do not compute."""
        self._reward, self._device_scorers = reward, device_scorers or {}
        self._pass_term = pass_term(reward)
        self._error_counts: Counter[str] = Counter()
        self._terms = {name: term for name, term in reward.terms.items() if name not in self._device_scorers}
        worker_reward = dataclasses.replace(reward, terms=self._terms, passes=None)
        self._workers = [_Worker(worker_reward) for _ in range(reward.workers if is_main() and self._terms else 0)]
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Sample], *, group_size: int = 1) -> list[RewardResult]:
        """The results of the samples; `group_size` consecutive ones have the same prompt. A collective call."""
        device_scores = {name: score(samples) for name, score in self._device_scorers.items()}
        results: list[RewardResult] = broadcast(
            self._score(samples, group_size, device_scores) if is_main() else None,
            encode=lambda items: [dataclasses.asdict(item) for item in items],
            decode=lambda items: [RewardResult(**item) for item in items],
        )
        return results

    def _score(
        self, samples: Sequence[Sample], group_size: int, device_scores: Mapping[str, list[Score]]
    ) -> list[RewardResult]:
        scores = {**self._process_scores(samples, group_size), **device_scores}
        # Without terms, the environment alone gives rewards.
        return [self._result({name: scores[name][i] for name in self._reward.terms}) for i in range(len(samples))]

    def _process_scores(self, samples: Sequence[Sample], group_size: int) -> dict[str, list[Score]]:
        """The scores of each term that the workers compute; its units are distributed over them in turn."""
        samples = [dataclasses.replace(sample, ids=()) for sample in samples]
        scores: dict[str, list[Score]] = {name: [""] * len(samples) for name in self._terms}
        count = len(self._workers)
        units = {name: unit_indices(term, len(samples), group_size) for name, term in self._terms.items()}
        calls = [
            [(name, [[samples[i] for i in unit] for unit in units[name][start::count]]) for name in units]
            for start in range(count)
        ]
        replies = [iter(part) for part in self._threads.map(_Worker.score, self._workers, calls)]
        for name, start in itertools.product(units, range(count)):
            for unit in units[name][start::count]:
                for index, score in zip(unit, next(replies[start]), strict=True):
                    scores[name][index] = score
        return scores

    def close(self) -> None:
        """Kill the processes, and everything that they have started, even if they are busy."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)

    def _result(self, scores: Mapping[str, Score]) -> RewardResult:
        for name, score in scores.items():
            if isinstance(score, str):
                self._handle_error(f"reward.terms.{name} {score}")
        values = {name: 0.0 if isinstance(score, str) else score for name, score in scores.items()}
        return RewardResult(
            terms=values,
            reward=math.fsum(self._reward.terms[name].weight * value for name, value in values.items()),
            is_correct=values.get(self._pass_term, -math.inf) >= self._reward.pass_at,
            errors=sum(isinstance(score, str) for score in scores.values()),
        )

    def _handle_error(self, reason: str) -> None:
        """Log each distinct reason once, or end the run."""
        if self._reward.on_error is OnFault["raise"]:
            raise RewardError(f"{reason} (reward.on_error=raise)")
        self._error_counts[reason] += 1
        if self._error_counts[reason] == 1:
            log.warning("%s; the term counts as 0", reason)


class _Worker:
    """The supervisor of a reward process, as seen from the thread that talks to it."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self._lock = threading.Lock()
        self._link: SupervisorLink | None = None
        self._is_ended = False

    def start(self) -> None:
        """Start the supervisor, which starts the reward process."""
        with self._lock:
            if self._is_ended:
                raise RewardError("the reward pool was closed")
            self._link = SupervisorLink(supervise, self._reward)
        try:
            self._receive()
        except (EOFError, ConnectionError):
            raise RewardError("the supervisor of a reward process ended while it started; see stderr") from None

    def score(self, calls: Sequence[Call]) -> list[list[Score]]:
        """For each unit of each call, in order, the score of each sample or the reason why it failed."""
        try:
            assert self._link is not None
            self._link.pipe.send(calls)
            scores: list[list[Score]] = self._receive()
        except (EOFError, OSError):
            # Only user code that kills processes other than its own gets here.
            with self._lock:
                self._stop()
            self.start()
            reason = "crashed the supervisor of its process"
            return [[reason] * len(unit) for _, units in calls for unit in units]
        return scores

    def _receive(self) -> Any:
        assert self._link is not None
        reply = self._link.pipe.recv()
        if isinstance(reply, LoadFailure):
            term = self._reward.terms[reply.term]
            field, value, hint = "kind", term.kind.value, "pip install 'maxhydra[rl]'"
            if term.function is not None:
                field, value, hint = "function", term.function, "check that its folder is on PYTHONPATH"
            elif term.kind is RewardKind.judge:
                field, value, hint = "judge.key_variable", str(term.judge.key_variable), "export it before the command"
            raise ConfigError(Problem(f"reward.terms.{reply.term}.{field}", reply.reason, value=value, hint=hint))
        return reply

    def end(self) -> None:
        with self._lock:
            self._is_ended = True
            self._stop()

    def _stop(self) -> None:
        if self._link is not None:
            self._link.stop()
