"""Trials proposed by Optuna: the search space, a study on disk, a sampler, and a pruner for bad trials.

Hydra's sweep syntax is converted to Optuna distributions: a,b,c and choice(a,b,c) are categorical; range(1,9,2) is
stepped; interval(0,1) is uniform; tag(log,interval(1e-5,1e-2)) is log-uniform; int(interval(1,8)) is integer-valued.
"""

import itertools
import logging
import math
import shlex
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution, IntDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from maxhydra.config.compose.hydra_loader import job_folder
from maxhydra.config.compose.overrides import parse
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.migrations import migrate_overrides
from maxhydra.launch.base import Trial
from maxhydra.sweep.controller import TrialStatus
from maxhydra.sweep.plan import Settings, SweepPlan

# Values of one range(...), all of which a grid would run.
MAX_RANGE = 1_000_000
# Largest bound of a range or an interval, far inside float64.
LARGEST_BOUND = 1e300


def distributions(space: dict[str, str], *, grid: bool) -> dict[str, BaseDistribution]:
    """Map keys to distributions, in the given order. Raises one ConfigError with all problems."""
    parsed = parse([f"{key}={text}" for key, text in space.items()], loader=None)
    problems = list(parsed.problems)
    result: dict[str, BaseDistribution] = {}
    for override in parsed.overrides:
        key = override.get_key_element()
        distribution = _distribution(override)
        if isinstance(distribution, Problem):
            problems.append(distribution)
        elif grid and _is_continuous(distribution):
            hint = "list the values, or choose another hydra.sweeper.sampler"
            problems.append(Problem(key, "is continuous, but a grid needs discrete values", space[key], hint=hint))
        else:
            result[key] = distribution
    if problems:
        raise ConfigError(problems)
    return result


def grid_values(distribution: BaseDistribution) -> list[Any]:
    """All values of a discrete distribution."""
    if isinstance(distribution, CategoricalDistribution):
        return list(distribution.choices)
    assert isinstance(distribution, (IntDistribution, FloatDistribution)) and distribution.step
    count = round((distribution.high - distribution.low) / distribution.step) + 1
    return [distribution.low + index * distribution.step for index in range(count)]


def overrides_of(params: dict[str, Any]) -> list[str]:
    """Overrides that set sampled parameters."""
    return [f"{key}={value}" for key, value in params.items()]


def _distribution(override: Override) -> BaseDistribution | Problem:
    key, value, text = override.get_key_element(), override.value(), override.get_value_string()
    if isinstance(value, ChoiceSweep):
        choices = list(override.sweep_string_iterator())
        if not choices:
            return Problem(key, "has no values", text, "at least one value")
        return CategoricalDistribution(choices)
    if isinstance(value, RangeSweep):
        return _range_distribution(key, text, value)
    if isinstance(value, IntervalSweep):
        return _interval_distribution(key, text, value)
    hint = "give several values, range(...) or interval(...)"
    return Problem(key, "is a single value, which cannot be searched", text, hint=hint)


def _range_distribution(key: str, text: str, sweep: RangeSweep) -> BaseDistribution | Problem:
    """Distribution of range(start, stop, step), which excludes stop as in Python."""
    start, stop, step = sweep.start, sweep.stop, sweep.step
    assert start is not None and stop is not None
    if problem := _not_finite(key, text, start, stop, step):
        return problem
    length = (stop - start) / step if step else 0.0
    if length <= 0:
        return Problem(key, "is an empty range", text, "range(start, stop, step) with at least one value")
    if length > MAX_RANGE:
        hint = "interval(start, end) has no such limit"
        return Problem(key, f"has over {MAX_RANGE:,} values", text, f"at most {MAX_RANGE:,} values", hint)
    count = math.ceil(length)
    last = start + (count - 1) * step
    low, high, step = min(start, last), max(start, last), abs(step)
    if isinstance(low, int) and isinstance(high, int) and isinstance(step, int):
        return IntDistribution(low, high, step=step)
    return FloatDistribution(float(low), float(high), step=float(step))


def _not_finite(key: str, text: str, *values: float) -> Problem | None:
    """Return the problem of a bound that Optuna cannot represent."""
    if all(abs(value) <= LARGEST_BOUND for value in values):
        return None
    return Problem(key, "has a bound that is not a number or too large", text, f"numbers up to {LARGEST_BOUND:.0e}")


def _interval_distribution(key: str, text: str, sweep: IntervalSweep) -> BaseDistribution | Problem:
    start, end, is_log = sweep.start, sweep.end, "log" in sweep.tags
    assert start is not None and end is not None
    if problem := _not_finite(key, text, start, end):
        return problem
    if start >= end:
        return Problem(key, "is an empty interval", text, "interval(start, end) with start < end")
    if is_log and start <= 0:
        return Problem(key, "is log-scaled but does not start above 0", text, "a start > 0")
    if isinstance(start, int) and isinstance(end, int):
        return IntDistribution(start, end, log=is_log)
    return FloatDistribution(float(start), float(end), log=is_log)


def _is_continuous(distribution: BaseDistribution) -> bool:
    return not isinstance(distribution, CategoricalDistribution) and distribution.step is None  # type: ignore[attr-defined]


def split_overrides(overrides: Iterable[Override]) -> tuple[list[str], dict[str, str]]:
    """Split a sweep's overrides into those fixed for all jobs and the search space (key -> sweep expression)."""
    fixed, space = [], {}
    for override in overrides:
        if override.is_sweep_override():
            space[override.get_key_element()] = override.get_value_string()
        else:
            fixed.append(override.input_line or "")
    return fixed, space


optuna.logging.set_verbosity(logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

# Maximum number of Pareto-optimal jobs listed for several objectives.
MAX_BEST_SHOWN = 5
STATES = {
    TrialStatus.finished: TrialState.COMPLETE,
    TrialStatus.failed: TrialState.FAIL,
    TrialStatus.pruned: TrialState.PRUNED,
}


class SearchTrials:
    """Trials of an Optuna study, numbered from 0 in the order in which they were proposed."""

    def __init__(self, plan: SweepPlan):
        settings = plan.settings
        self._plan = plan
        self._space = self.check(plan)
        grid = _combinations(self._space) if settings.sampler == "grid" else []
        self._max_trials = len(grid) or settings.trials
        self._study = optuna.create_study(
            study_name=plan.folder.name,
            storage=_storage(settings, plan.folder),
            pruner=_pruner(settings),
            directions=[optuna.study.StudyDirection[name.upper()] for name in plan.directions],
            load_if_exists=True,
        )
        # After a restart, the same seed would repeat earlier samples.
        num_earlier = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _sampler(settings, None if settings.seed is None else settings.seed + num_earlier)
        for params in grid:
            self._study.enqueue_trial(params, skip_if_exists=True)

    @staticmethod
    def check(plan: SweepPlan) -> dict[str, BaseDistribution]:
        """Return the search space. Raises ConfigError if it is invalid."""
        return distributions(plan.space, grid=plan.settings.sampler == "grid")

    def unfinished(self) -> list[Trial]:
        running = self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])
        return [_from_study(trial, self._plan.folder) for trial in running]

    def num_remaining(self) -> int:
        states = [trial.state for trial in self._study.get_trials(deepcopy=False)]
        return max(0, self._max_trials - len(states) + states.count(TrialState.WAITING))

    def next_trial(self) -> Trial | None:
        if not self.num_remaining():
            return None
        return _from_study(self._study.ask(self._space), self._plan.folder)

    def report(self, trial: Trial, step: int, value: float) -> bool:
        stored = self._study.get_trials(deepcopy=False)[trial.number]
        study_trial = optuna.trial.Trial(self._study, stored._trial_id)
        if step not in stored.intermediate_values:
            study_trial.report(value, step)
        return study_trial.should_prune()

    def record_result(self, trial: Trial, status: TrialStatus, values: Sequence[float]) -> None:
        objectives = list(values) if status is TrialStatus.finished else None
        self._study.tell(trial.number, objectives, state=STATES[status])

    def counts(self) -> Mapping[TrialStatus, int]:
        states = [trial.state for trial in self._study.get_trials(deepcopy=False)]
        return {status: states.count(state) for status, state in STATES.items()}

    def best(self) -> str:
        trials = self._study.best_trials if self.counts()[TrialStatus.finished] else []
        return self._describe(trials[0]) if trials else ""

    def _describe(self, trial: FrozenTrial) -> str:
        values = zip(self._plan.objectives, trial.values, strict=True)
        return f"job {trial.number}, " + ", ".join(f"{name} {value:.4g}" for name, value in values)

    def highlights(self) -> list[str]:
        """The best jobs with the commands that rerun them, and the command that continues the search."""
        if not self.counts()[TrialStatus.finished]:
            return []
        lines = []
        for trial in self._study.best_trials[:MAX_BEST_SHOWN]:
            overrides = [*self._plan.fixed, *migrate_overrides(overrides_of(trial.params))]
            command = shlex.join(["maxhydra", *self._plan.context.flags, *overrides])
            lines += [f"best: {self._describe(trial)}", f"      {command}"]
        if self._plan.settings.sampler != "grid":
            lines.append(f"more: maxhydra sweep resume {self._plan.argument} --trials {2 * self._max_trials}")
        return lines


def _combinations(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    values = [grid_values(distribution) for distribution in space.values()]
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]


def _from_study(trial: optuna.trial.Trial | FrozenTrial, sweep: Path) -> Trial:
    """A trial of the study. An existing folder keeps its name, which earlier versions wrote with all digits."""
    overrides = overrides_of(trial.params)
    existing = next(sweep.glob(f"{trial.number}_*"), None)
    name = job_folder(trial.number, overrides, []) if existing is None else existing.name
    return Trial(trial.number, name, tuple(migrate_overrides(overrides)))


def _storage(settings: Settings, folder: Path) -> BaseStorage:
    if settings.storage == "sqlite":
        return RDBStorage(f"sqlite:///{folder / 'study.db'}")
    return JournalStorage(JournalFileBackend(str(folder / "study.journal")))


def _sampler(settings: Settings, seed: int | None) -> optuna.samplers.BaseSampler:
    samplers = optuna.samplers
    match settings.sampler:
        case "tpe":
            # constant_liar treats running trials as bad, so that parallel workers do not all sample the same region.
            return samplers.TPESampler(
                seed=seed, n_startup_trials=settings.startup_trials, constant_liar=True, multivariate=True
            )
        case "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=settings.startup_trials)
        case "nsga2":
            return samplers.NSGAIISampler(seed=seed)
        case _:  # The trials of a grid are enqueued in advance.
            return samplers.RandomSampler(seed=seed)


def _pruner(settings: Settings) -> optuna.pruners.BasePruner:
    pruners = optuna.pruners
    match settings.pruner:
        case "asha":
            return pruners.SuccessiveHalvingPruner(
                min_resource=settings.min_steps, reduction_factor=settings.reduction_factor
            )
        case "hyperband":
            return pruners.HyperbandPruner(min_resource=settings.min_steps, reduction_factor=settings.reduction_factor)
        case "median":
            return pruners.MedianPruner(n_startup_trials=settings.startup_trials, n_warmup_steps=settings.min_steps)
        case _:
            return pruners.NopPruner()
