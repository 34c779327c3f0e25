"""The tuner: tries candidates within a time limit, records the trials, and reports the best.

The next candidate depends only on the times so far, so an interrupted search resumes by asking for known times again.
"""

import dataclasses
import itertools
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.tasks.analysis import Search, TuneTask
from maxhydra.record import redact_argv
from maxhydra.runtime.progress import StepProgress
from maxhydra.tune.space import POLICIES, Axis, Candidate, apply_candidate
from maxhydra.tune.trial import FAILED, MEASURED, NO_MEMORY, PRUNED, Journal, Trial, bench_config, digest

# A setting within this factor of the best time is worth trying the settings that depend on it, such as the tiles of a
# kernel: tile sizes change the step time by a few per cent.
NEAR_BEST = 1.05
# (candidate, steps) -> seconds per token; infinite if it does not run. May raise OutOfTime.
Measure = Callable[[Candidate, int], float]


class OutOfTime(Exception):
    """The time limit is reached; the measurements so far remain valid."""


def one_by_one(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """Coordinate descent: vary each setting with the best values of the others until a round changes nothing.

    Returns all candidates that were tried. If no value of a setting runs, the last one is used, which needs the least
    memory. A setting that depends on another is tried if that one is near the best.
    """
    tried: list[Candidate] = [{}]
    best: Candidate = {}
    time = measure(best, steps)
    while True:
        time_before = time
        for axis in space:
            options = [_drop_dependents({**best, **axis.under, axis.key: override}, space) for override in axis.values]
            if axis.under:
                options.insert(0, {**best, **axis.under})
                if not measure(options[0], steps) < NEAR_BEST * time:
                    continue
            times = [measure(option, steps) for option in options]
            tried += [option for option in options if option not in tried]
            fastest = min(times)
            if fastest < time or math.isinf(time):
                last = len(times) - 1 - times[::-1].index(fastest)
                best, time = options[last], fastest
        if time == time_before:
            return tried


def _drop_dependents(candidate: Candidate, space: Sequence[Axis]) -> Candidate:
    """The candidate without settings that depend on a value which it no longer has."""
    dropped = {axis.key for axis in space if not axis.under.items() <= candidate.items()}
    return {key: override for key, override in candidate.items() if key not in dropped}


def grid(space: Sequence[Axis], measure: Measure, *, steps: int) -> list[Candidate]:
    """Every combination, and the unchanged config."""
    combinations = itertools.product(*(axis.values for axis in space))
    keys = [axis.key for axis in space]
    tried: list[Candidate] = [{}, *(dict(zip(keys, overrides, strict=True)) for overrides in combinations)]
    for candidate in tried:
        measure(candidate, steps)
    return tried


def eliminate(tried: Sequence[Candidate], measure: Measure, *, steps: int, finalists: int) -> None:
    """Successive halving: time the best again over twice the steps, and keep the better half for the next round."""
    remaining = _fastest(tried, measure, steps, finalists)
    while len(remaining) > 1:
        steps *= 2
        remaining = _fastest(remaining, measure, steps, math.ceil(len(remaining) / 2))


def _fastest(candidates: Sequence[Candidate], measure: Measure, steps: int, count: int) -> list[Candidate]:
    """The `count` fastest candidates that run; candidates that resolve to the same config count once."""
    times: dict[float, Candidate] = {}
    for candidate in candidates:
        time = measure(candidate, steps)
        if math.isfinite(time):
            times.setdefault(time, candidate)
    return [times[time] for time in sorted(times)[:count]]


log = logging.getLogger("maxhydra")

# Share of the time limit for new candidates; the rest is for timing the best again.
EXPLORATION_SHARE = 0.75
# Maximum number of characters of a setting in the table.
MAX_WIDTH = 60


@dataclasses.dataclass
class Tuner:
    """A search in a run's folder; running it again in the same folder resumes it."""

    config: Config
    task: TuneTask
    space: list[Axis]
    choices: Mapping[str, str]
    overrides: Sequence[str]
    """The overrides that the config was composed from."""
    folder: Path
    environment: Mapping[str, str]
    """Environment variables of the trial processes."""
    progress: StepProgress

    def __post_init__(self) -> None:
        self.journal = Journal(self.folder, digest(bench_config(self.config, self.task.steps)))
        self._share = EXPLORATION_SHARE
        self._reported_errors: set[str] = set()

    def run(self) -> str:
        """Search until there is nothing left to try or the time is up; returns the reason why it ended."""
        task = self.task
        time_is_up = f"the time limit task.minutes={task.minutes:g} was reached"
        explore = grid if task.search is Search.grid else one_by_one
        try:
            tried = explore(self.space, self.measure, steps=task.steps)
            reason = "nothing left to try"
        except OutOfTime:
            reason = time_is_up
            tried = list({trial.key: trial.candidate for trial in self.journal.trials}.values())
        self._share = 1.0
        try:
            eliminate(tried, self.measure, steps=task.steps, finalists=task.finalists)
        except OutOfTime:
            reason = time_is_up
        return f"{reason} after {len(self.journal.trials)} trials"

    def measure(self, candidate: Candidate, steps: int) -> float:
        """Seconds per token, from the journal or from a new trial; infinite if the candidate does not run."""
        try:
            config = bench_config(apply_candidate(self.config, candidate, self.task.batch), steps)
        except ConfigError as error:
            # Incompatible values, such as a loss chunk that does not divide the sequence length.
            message = f"{describe(candidate)}: {error.problems[0].path} {error.problems[0].reason}"
            if message not in self._reported_errors:
                self._reported_errors.add(message)
                self.progress.message(message)
            return math.inf
        trial = self.journal.find(digest(config))
        if trial is None:
            if self.journal.seconds > 60 * self.task.minutes * self._share:
                raise OutOfTime
            trial = self._run_trial(config, candidate, steps)
            self.journal.add(trial)
            self._report(trial)
        return trial.seconds_per_token

    def _run_trial(self, config: Config, candidate: Candidate, steps: int) -> Trial:
        if any(needs_less(other, config) for other in self._out_of_memory_configs(steps)):
            reason = "needs more memory than a candidate that ran out of memory"
            return self.journal.trial(config, candidate, steps, status=PRUNED, reason=reason)
        overrides = [text for text in (*self.overrides, *candidate.values()) if not text.startswith("task")]
        facts = {"choices": {**self.choices, "task": "bench"}, "overrides": redact_argv(overrides)}
        limit = 60 * self.task.trial_minutes
        return self.journal.run(config, candidate, steps, job_facts=facts, environment=self.environment, limit=limit)

    def _out_of_memory_configs(self, steps: int) -> list[Config]:
        candidates = [trial.candidate for trial in self.journal.trials if trial.status == NO_MEMORY]
        return [bench_config(apply_candidate(self.config, item, self.task.batch), steps) for item in candidates]

    def best(self) -> Trial | None:
        """The fastest candidate, each judged by its longest measurement."""
        longest: dict[str, Trial] = {}
        for trial in self.journal.trials:
            name = str(trial.candidate)
            longest[name] = max(trial, longest.get(name, trial), key=_steps)
        fastest = min(longest.values(), key=lambda trial: trial.seconds_per_token, default=None)
        return fastest if fastest is not None and math.isfinite(fastest.seconds_per_token) else None

    def baseline(self) -> Trial | None:
        """The measurement of the unchanged config, if it runs."""
        trials = [trial for trial in self.journal.trials if not trial.candidate and trial.line]
        return max(trials, key=_steps, default=None)

    def _report(self, trial: Trial) -> None:
        number = len(self.journal.trials)
        self.progress.message(f"{number}: {describe(trial.candidate)}: {describe_result(trial)}")
        best = self.best()
        metrics = {} if best is None else {"tokens_per_second": best.line["tokens_per_second"]}
        self.progress.update(min(number, expected_trials(self.space, self.task)), metrics)


def describe(candidate: Candidate) -> str:
    """The settings of a candidate; a long list is shortened to its end, which is the part that differs."""
    texts = [text if len(text) <= MAX_WIDTH else f"{key}=[...{text[-MAX_WIDTH:]}" for key, text in candidate.items()]
    return " ".join(texts) or "as given"


def describe_result(trial: Trial) -> str:
    if not trial.line:
        return f"{trial.status}: {trial.reason}" if trial.status == FAILED else trial.status
    memory = "" if trial.memory_gib is None else f", {trial.memory_gib:g} GiB"
    return f"{trial.line['tokens_per_second']:,} tokens/s over {trial.steps} steps{memory}"


def expected_trials(space: list[Axis], task: TuneTask) -> int:
    """An estimate of the number of trials, for the progress display."""
    if task.search is Search.grid:
        first = math.prod(len(axis.values) for axis in space)
    else:
        first = 1 + sum(len(axis.values) - 1 for axis in space)
    return first + 2 * min(task.finalists, first) - 2


def _steps(trial: Trial) -> int:
    return trial.steps


def needs_less(config: Config, other: Config) -> bool:
    """Whether `config` certainly needs no more memory than `other`.

    True if they differ only in that `config` has a smaller batch or a remat policy that saves more memory.
    """

    def without_batch_and_remat(config: Config) -> Config:
        train = dataclasses.replace(config.train, per_device_batch_size=1.0, grad_accum=1)
        remat = dataclasses.replace(config.model.remat, policy=POLICIES[0])
        model = dataclasses.replace(config.model, remat=remat)
        return dataclasses.replace(config, train=train, model=model)

    policies = (config.model.remat.policy, other.model.remat.policy)
    if any(policy not in POLICIES for policy in policies):
        return False
    remats_more = POLICIES.index(policies[0]) >= POLICIES.index(policies[1])
    is_smaller = config.train.per_device_batch_size <= other.train.per_device_batch_size
    return remats_more and is_smaller and without_batch_and_remat(config) == without_batch_and_remat(other)


HEADER = ("tokens/s", "step ms", "GiB", "steps", "compile s", "settings")


def table(trials: Sequence[Trial]) -> str:
    """The fastest first, failed trials last."""
    ranked = sorted(trials, key=lambda trial: trial.seconds_per_token)
    rows = [HEADER, *(_row(trial) for trial in ranked)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join([*(cell.rjust(width) for cell, width in zip(row[:-1], widths, strict=False)), row[-1]])
        for row in rows
    )


def _row(trial: Trial) -> tuple[str, ...]:
    if trial.status != MEASURED:
        return (trial.status, "", "", str(trial.steps), "", describe(trial.candidate))
    line = trial.line
    return (
        f"{line['tokens_per_second']:,}",
        f"{line['step_ms']:g}",
        "" if trial.memory_gib is None else f"{trial.memory_gib:g}",
        str(trial.steps),
        f"{line['compile_s']:g}",
        describe(trial.candidate),
    )
