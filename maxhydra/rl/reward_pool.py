"""A pool of processes that compute rewards, because reward code is user code that may raise, hang or crash.

A process computes one term of one completion at a time and sends each result before it continues, so that the pool
knows which call hangs. That process is then killed, and a new one continues after that call.
"""

import contextlib
import dataclasses
import itertools
import logging
import math
import os
import signal
import threading
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.reward import OnFault, Reward, Term
from maxhydra.rl.rewards import Sample, build_score

log = logging.getLogger("maxhydra")
# Not fork: the threads of jax do not survive a fork.
SPAWN = get_context("spawn")
# Seconds for a process to import the reward functions.
START_TIMEOUT = 120.0
# Times that a term may hang or crash in one call before it is skipped for the rest of the batch.
MAX_FAILURES = 3


class RewardError(Exception):
    """A term failed under reward.on_error=raise."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """The reward of a completion: unweighted terms, weighted sum, correctness, and the number of failed terms."""

    terms: dict[str, float]
    reward: float
    is_correct: bool
    errors: int


class RewardPool:
    """Scores completions. The constructor starts the processes; ConfigError if a term cannot be loaded."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self._pass_term = reward.passes or next(iter(reward.terms))
        self._error_counts: Counter[str] = Counter()
        self._workers = [_Worker(reward) for _ in range(reward.workers)]
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    def score(self, samples: Sequence[Sample]) -> list[RewardResult]:
        """The results of the samples, in order."""
        count = len(self._workers)
        worker_scores = self._threads.map(
            _Worker.score, self._workers, [samples[start::count] for start in range(count)]
        )
        scores = [iter(part) for part in worker_scores]
        return [self._result(next(scores[index % count])) for index in range(len(samples))]

    def close(self) -> None:
        """Kill the processes, even if they are busy."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)

    def _result(self, scores: list[float | str]) -> RewardResult:
        named_scores = dict(zip(self._reward.terms, scores, strict=True))
        for name, score in named_scores.items():
            if isinstance(score, str):
                self._handle_error(f"reward.terms.{name} {score}")
        values = {name: 0.0 if isinstance(score, str) else score for name, score in named_scores.items()}
        return RewardResult(
            terms=values,
            reward=math.fsum(self._reward.terms[name].weight * value for name, value in values.items()),
            is_correct=values[self._pass_term] >= self._reward.pass_at,
            errors=sum(isinstance(score, str) for score in scores),
        )

    def _handle_error(self, reason: str) -> None:
        """Log each distinct reason once, or end the run."""
        if self._reward.on_error is OnFault["raise"]:
            raise RewardError(f"{reason} (reward.on_error=raise)")
        self._error_counts[reason] += 1
        if self._error_counts[reason] == 1:
            log.warning("%s; the term counts as 0", reason)


class _Worker:
    """A reward process, as seen from the thread that talks to it."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_ended = False

    def start(self) -> None:
        """Start the process, replacing the current one if there is one."""
        with self._lock:
            if self._is_ended:
                raise RewardError("the reward pool was closed")
            self._stop()
            self._pipe, child_pipe = SPAWN.Pipe()
            self._process = SPAWN.Process(target=_serve, args=(child_pipe, self._reward.terms), daemon=True)
            self._process.start()
            child_pipe.close()
        problem = self._receive(START_TIMEOUT)
        if problem is not None:
            name, reason = problem if isinstance(problem, tuple) else (next(iter(self._reward.terms)), problem)
            term = self._reward.terms[name]
            field = "function" if term.function is not None else "kind"
            hint = "check that its folder is on PYTHONPATH" if term.function else "pip install 'maxhydra[rl]'"
            value = term.function or term.kind.value
            raise ConfigError(Problem(f"reward.terms.{name}.{field}", reason, value=value, hint=hint))

    def score(self, samples: Sequence[Sample]) -> list[list[float | str]]:
        """For each sample, the value of each term or the reason why it failed."""
        terms = range(len(self._reward.terms))
        work = list(itertools.product(range(len(samples)), terms))
        scores: dict[tuple[int, int], float | str] = {}
        failures = [0 for _ in terms]
        while work:
            self._send([(samples[index], term) for index, term in work])
            replies, must_restart = self._receive_replies(len(work))
            scores.update(zip(work, replies, strict=False))
            if must_restart:
                term = work[len(replies) - 1][1]
                failures[term] += 1
                if failures[term] == MAX_FAILURES:
                    reason = f"was skipped after {MAX_FAILURES} hangs or crashes in a batch"
                    scores.update({unit: reason for unit in work[len(replies) :] if unit[1] == term})
                self.start()
            work = [unit for unit in work if unit not in scores]
        return [[scores[index, term] for term in terms] for index in range(len(samples))]

    def _send(self, work: list[tuple[Sample, int]]) -> None:
        # A process that has died is noticed when its reply is received.
        with contextlib.suppress(OSError):
            assert self._pipe is not None
            self._pipe.send(work)

    def _receive_replies(self, count: int) -> tuple[list[float | str], bool]:
        """`count` replies; or those up to a hang or crash, and True because the process must be replaced."""
        replies: list[Any] = []
        for _ in range(count):
            try:
                replies.append(self._receive(self._reward.timeout))
            except TimeoutError:
                return [*replies, f"exceeded reward.timeout={self._reward.timeout:g} s"], True
            except (EOFError, OSError):
                return [*replies, "crashed its process"], True
        return replies, False

    def _receive(self, seconds: float) -> Any:
        assert self._pipe is not None
        if not self._pipe.poll(seconds):
            raise TimeoutError
        return self._pipe.recv()

    def end(self) -> None:
        with self._lock:
            self._is_ended = True
            self._stop()

    def _stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
        if self._pipe is not None:
            self._pipe.close()
        self._process = self._pipe = None


def _serve(pipe: Connection, terms: dict[str, Term]) -> None:
    """Main of a reward process: load the terms, report success or a failed term, then score until the pipe closes."""
    # A terminal or a cluster signals every process of a run; the run still needs its rewards to save its final state.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    score_fns = []
    for name, term in terms.items():
        try:
            score_fns.append(build_score(term))
        except Exception as error:  # an import may raise anything
            pipe.send((name, f"cannot be loaded: {_describe_error(error)}"))
            return
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            for sample, index in pipe.recv():
                try:
                    pipe.send(_to_number(score_fns[index](sample)))
                except Exception as error:  # user code may raise anything; the parent reports it
                    pipe.send(f"raised {_describe_error(error)}")


def _to_number(value: object) -> float | str:
    """A finite number, or the reason why it is not one; NumPy scalars and booleans count as numbers."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"returned {type(value).__name__} instead of a number"
    return (
        number if math.isfinite(number) and not isinstance(value, str) else f"returned {value!r}, not a finite number"
    )


def _describe_error(error: Exception) -> str:
    """An error on one line, with the file and line that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    location = f" ({os.path.basename(last.filename)}:{last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{location}"


def _end_with_parent() -> None:
    """Exit when the parent does: a hanging reward function must not outlive the run."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
