"""Tries candidates within a time, remembers what came of each, and knows which is best."""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.tasks.tune import Search, TuneTask
from maxhydra.record import scrub_argv
from maxhydra.train.progress import Progress
from maxhydra.tune.search import OutOfTime, eliminate, grid, one_by_one
from maxhydra.tune.space import POLICIES, Axis, Candidate, settled
from maxhydra.tune.trial import FAILED, HOPELESS, NO_MEMORY, Journal, Trial, bench_config, digest

log = logging.getLogger("maxhydra")

# Share of the time after which no new candidate is tried, and the best are timed again.
EXPLORING = 0.75
# Characters of a setting in a table.
LONGEST = 60


@dataclasses.dataclass
class Tuner:
    """A search in a run's folder; the same folder again goes on with it."""

    config: Config
    task: TuneTask
    space: list[Axis]
    choices: Mapping[str, str]
    overrides: Sequence[str]
    """What the config was composed from."""
    folder: Path
    environment: Mapping[str, str]
    """Of the trials' processes."""
    progress: Progress

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder, digest(bench_config(self.config, self.task.steps)))
        self._share = EXPLORING
        self._refused: set[str] = set()

    def run(self) -> str:
        """Search until there is nothing left to try, or no time; why it ended."""
        task = self.task
        spent = f"task.minutes={task.minutes:g} were over"
        explore = grid if task.search is Search.grid else one_by_one
        try:
            tried = explore(self.space, self.measure, steps=task.steps)
            reason = "nothing left to try"
        except OutOfTime:
            reason = spent
            tried = list({trial.key: trial.candidate for trial in self.journal.trials}.values())
        self._share = 1.0
        try:
            eliminate(tried, self.measure, steps=task.steps, finalists=task.finalists)
        except OutOfTime:
            reason = spent
        return f"{reason} after {len(self.journal.trials)} trials"

    def measure(self, candidate: Candidate, steps: int) -> float:
        """Seconds a token, known or measured now."""
        try:
            config = bench_config(settled(self.config, candidate, self.task.batch), steps)
        except ConfigError as error:
            # Values that do not go together, such as a chunk and a length.
            if (
                said := f"{words(candidate)}: {error.problems[0].path} {error.problems[0].reason}"
            ) not in self._refused:
                self._refused.add(said)
                self.progress.message(said)
            return math.inf
        trial = self.journal.find(digest(config))
        if trial is None:
            if self.journal.seconds > 60 * self.task.minutes * self._share:
                raise OutOfTime
            trial = self._try(config, candidate, steps)
            self.journal.add(trial)
            self._tell(trial)
        return trial.seconds_per_token

    def _try(self, config: Config, candidate: Candidate, steps: int) -> Trial:
        if any(needs_less(other, config) for other in self._without_memory(steps)):
            reason = "needs more memory than one that had too little"
            return self.journal.trial(config, candidate, steps, status=HOPELESS, reason=reason)
        overrides = [text for text in (*self.overrides, *candidate.values()) if not text.startswith("task")]
        told = {"choices": {**self.choices, "task": "bench"}, "overrides": scrub_argv(overrides)}
        limit = 60 * self.task.trial_minutes
        return self.journal.run(config, candidate, steps, told=told, environment=self.environment, limit=limit)

    def _without_memory(self, steps: int) -> list[Config]:
        lacking = [trial.candidate for trial in self.journal.trials if trial.status == NO_MEMORY]
        return [bench_config(settled(self.config, candidate, self.task.batch), steps) for candidate in lacking]

    def best(self) -> Trial | None:
        """The fastest, each candidate by its longest measurement."""
        longest: dict[str, Trial] = {}
        for trial in self.journal.trials:
            name = str(trial.candidate)
            longest[name] = max(trial, longest.get(name, trial), key=_steps)
        fastest = min(longest.values(), key=lambda trial: trial.seconds_per_token, default=None)
        return fastest if fastest is not None and math.isfinite(fastest.seconds_per_token) else None

    def baseline(self) -> Trial | None:
        """The settings as they were given, where they run."""
        own = [trial for trial in self.journal.trials if not trial.candidate and trial.line]
        return max(own, key=_steps, default=None)

    def _tell(self, trial: Trial) -> None:
        number = len(self.journal.trials)
        self.progress.message(f"{number}: {words(trial.candidate)}: {outcome(trial)}")
        best = self.best()
        shown = {} if best is None else {"tokens_per_second": best.line["tokens_per_second"]}
        self.progress.update(min(number, expected_trials(self.space, self.task)), shown)


def words(candidate: Candidate) -> str:
    """The settings of a candidate; of a long list its end, where what differs stands."""
    cut = [text if len(text) <= LONGEST else f"{key}=[...{text[-LONGEST:]}" for key, text in candidate.items()]
    return " ".join(cut) or "as given"


def outcome(trial: Trial) -> str:
    if not trial.line:
        return f"{trial.status}: {trial.reason}" if trial.status == FAILED else trial.status
    used = "" if trial.memory_gib is None else f", {trial.memory_gib:g} GiB"
    return f"{trial.line['tokens_per_second']:,} tokens/s over {trial.steps} steps{used}"


def expected_trials(space: list[Axis], task: TuneTask) -> int:
    """About how many trials there will be, for the display."""
    if task.search is Search.grid:
        first = math.prod(len(axis.values) for axis in space)
    else:
        first = 1 + sum(len(axis.values) - 1 for axis in space)
    return first + 2 * min(task.finalists, first) - 2


def _steps(trial: Trial) -> int:
    return trial.steps


def needs_less(one: Config, other: Config) -> bool:
    """Whether one config surely needs no more memory: the same but for a smaller batch, or a more frugal policy."""

    def rest(config: Config) -> Config:
        train = dataclasses.replace(config.train, per_device_batch_size=1.0, grad_accum=1)
        remat = dataclasses.replace(config.model.remat, policy=POLICIES[0])
        model = dataclasses.replace(config.model, remat=remat)
        return dataclasses.replace(config, train=train, model=model)

    policies = (one.model.remat.policy, other.model.remat.policy)
    if any(policy not in POLICIES for policy in policies):
        return False
    is_frugal = POLICIES.index(policies[0]) >= POLICIES.index(policies[1])
    is_small = one.train.per_device_batch_size <= other.train.per_device_batch_size
    return is_frugal and is_small and rest(one) == rest(other)
