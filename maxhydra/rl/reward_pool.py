"""Rewards of answers, computed in processes of their own: code that is not ours may raise, hang or crash there.

A process computes one term of one answer at a time and says what came of it before it goes on, so that what hangs is
known; it is then ended, and another takes up the work after that point.
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
# Not forked: the threads of jax do not survive a fork.
SPAWN = get_context("spawn")
# Seconds until a process has imported what it needs.
STARTING = 120.0
# Times that a term may hang or crash in one call before the rest of the batch goes without it.
MOST_FAILURES = 3


class RewardError(Exception):
    """A term that could not be computed, under reward.on_error=raise."""


@dataclasses.dataclass(frozen=True)
class RewardResult:
    """What an answer is worth: by term before its weight, in all, and how many terms could not be computed."""

    terms: dict[str, float]
    reward: float
    is_right: bool
    errors: int


class RewardPool:
    """Scores answers. Opening it starts the processes, and raises ConfigError for a term that cannot be loaded."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self._passes = reward.passes or next(iter(reward.terms))
        self._reasons: Counter[str] = Counter()
        self._workers = [_Worker(reward) for _ in range(reward.workers)]
        self._threads = ThreadPoolExecutor(reward.workers, thread_name_prefix="reward")
        try:
            list(self._threads.map(_Worker.start, self._workers))
        except BaseException:
            self.close()
            raise

    def score(self, answers: Sequence[Sample]) -> list[RewardResult]:
        """A verdict for each answer, in order."""
        count = len(self._workers)
        parts = self._threads.map(_Worker.score, self._workers, [answers[start::count] for start in range(count)])
        found = [iter(part) for part in parts]
        return [self._verdict(next(found[index % count])) for index in range(len(answers))]

    def close(self) -> None:
        """End the processes, whatever they are at."""
        for worker in self._workers:
            worker.end()
        self._threads.shutdown(wait=True)

    def _verdict(self, scores: list[float | str]) -> RewardResult:
        names = dict(zip(self._reward.terms, scores, strict=True))
        for name, score in names.items():
            if isinstance(score, str):
                self._note(f"reward.terms.{name} {score}")
        values = {name: 0.0 if isinstance(score, str) else score for name, score in names.items()}
        return RewardResult(
            terms=values,
            reward=math.fsum(self._reward.terms[name].weight * value for name, value in values.items()),
            is_right=values[self._passes] >= self._reward.pass_at,
            errors=sum(isinstance(score, str) for score in scores),
        )

    def _note(self, reason: str) -> None:
        """Say what went wrong, once for each reason, or end the run."""
        if self._reward.on_error is OnFault["raise"]:
            raise RewardError(f"{reason} (reward.on_error=raise)")
        self._reasons[reason] += 1
        if self._reasons[reason] == 1:
            log.warning("%s; it counts as 0", reason)


class _Worker:
    """A process, and the thread's side of it."""

    def __init__(self, reward: Reward):
        self._reward = reward
        self._lock = threading.Lock()
        self._process: BaseProcess | None = None
        self._pipe: Connection | None = None
        self._is_ended = False

    def start(self) -> None:
        """Start the process, in the place of one that there may be."""
        with self._lock:
            if self._is_ended:
                raise RewardError("rewards were given up")
            self._stop()
            self._pipe, theirs = SPAWN.Pipe()
            self._process = SPAWN.Process(target=_serve, args=(theirs, self._reward.terms), daemon=True)
            self._process.start()
            theirs.close()
        problem = self._reply(STARTING)
        if problem is not None:
            name, reason = problem if isinstance(problem, tuple) else (next(iter(self._reward.terms)), problem)
            term = self._reward.terms[name]
            field = "function" if term.function is not None else "kind"
            hint = "is its folder on PYTHONPATH?" if term.function is not None else "pip install 'maxhydra[rl]'"
            value = term.function or term.kind
            raise ConfigError(Problem(f"reward.terms.{name}.{field}", reason, value=value, hint=hint))

    def score(self, answers: Sequence[Sample]) -> list[list[float | str]]:
        """For each answer what its terms gave, or why there is nothing."""
        terms = range(len(self._reward.terms))
        work = list(itertools.product(range(len(answers)), terms))
        found: dict[tuple[int, int], float | str] = {}
        failures = [0 for _ in terms]
        while work:
            self._send([(answers[place], term) for place, term in work])
            replies, is_lost = self._replies(len(work))
            found.update(zip(work, replies, strict=False))
            if is_lost:
                term = work[len(replies) - 1][1]
                failures[term] += 1
                if failures[term] == MOST_FAILURES:
                    reason = f"was left out after {MOST_FAILURES} such failures in a batch"
                    found.update({unit: reason for unit in work[len(replies) :] if unit[1] == term})
                self.start()
            work = [unit for unit in work if unit not in found]
        return [[found[place, term] for term in terms] for place in range(len(answers))]

    def _send(self, work: list[tuple[Sample, int]]) -> None:
        # A process that has ended is noticed when its reply is waited for.
        with contextlib.suppress(OSError):
            assert self._pipe is not None
            self._pipe.send(work)

    def _replies(self, count: int) -> tuple[list[float | str], bool]:
        """So many; or those up to one for which the process must be replaced, and that this is so."""
        replies: list[Any] = []
        for _ in range(count):
            try:
                replies.append(self._reply(self._reward.timeout))
            except TimeoutError:
                return [*replies, f"took over reward.timeout={self._reward.timeout:g} s"], True
            except (EOFError, OSError):
                return [*replies, "ended its process"], True
        return replies, False

    def _reply(self, seconds: float) -> Any:
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
    """What a process does: say that it is ready, or what cannot be loaded; then terms of answers until nobody asks."""
    # A terminal or a cluster signals every process of a run, which then saves its end: it needs its rewards for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    scores = []
    for name, term in terms.items():
        try:
            scores.append(build_score(term))
        except Exception as error:  # an import may raise anything
            pipe.send((name, f"cannot be loaded: {_line(error)}"))
            return
    pipe.send(None)
    with contextlib.suppress(EOFError):
        while True:
            for answer, index in pipe.recv():
                try:
                    pipe.send(_number(scores[index](answer)))
                except Exception as error:  # whatever it is, it is named where the reward is used
                    pipe.send(f"raised {_line(error)}")


def _number(value: object) -> float | str:
    """A finite number, or what it is instead; NumPy's numbers and truth values count as numbers."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return f"gave no number but {type(value).__name__}"
    return number if math.isfinite(number) and not isinstance(value, str) else f"gave {value!r}, no finite number"


def _line(error: Exception) -> str:
    """An error in a line, with the place in the file that raised it."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f" ({os.path.basename(last.filename)}:{last.lineno})"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}{where}"


def _end_with_parent() -> None:
    """A function that hangs must not outlive the run."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
