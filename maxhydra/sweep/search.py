"""Trials proposed by Optuna: a study on disk, a sampler that learns from it, and a pruner for bad trials."""

import itertools
import logging
import shlex
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from maxhydra.config.compose.resolvers import job_folder
from maxhydra.config.migrations import migrate_overrides
from maxhydra.launch.base import Trial
from maxhydra.sweep.plan import Settings, SweepPlan
from maxhydra.sweep.space import distributions, grid_values, overrides_of
from maxhydra.sweep.trials import TrialStatus, format_counts

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
        return [_from_study(trial) for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])]

    def next_trial(self) -> Trial | None:
        proposed = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state is not TrialState.WAITING]
        if len(proposed) >= self._max_trials:
            return None
        return _from_study(self._study.ask(self._space))

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

    def summary(self) -> str:
        """Counts, and the best jobs with the commands that rerun them."""
        counts = self.counts()
        lines = [format_counts(counts)]
        if not counts[TrialStatus.finished]:
            return lines[0]
        for trial in self._study.best_trials[:MAX_BEST_SHOWN]:
            values = zip(self._plan.objectives, trial.values, strict=True)
            scores = ", ".join(f"{name} {value:.4g}" for name, value in values)
            command = shlex.join(["maxhydra", *self._plan.fixed, *migrate_overrides(overrides_of(trial.params))])
            lines.append(f"best: job {trial.number}, {scores}\n      {command}")
        return "\n".join(lines)


def _combinations(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    values = [grid_values(distribution) for distribution in space.values()]
    return [dict(zip(space, combination, strict=True)) for combination in itertools.product(*values)]


def _from_study(trial: optuna.trial.Trial | FrozenTrial) -> Trial:
    overrides = overrides_of(trial.params)
    return Trial(trial.number, job_folder(trial.number, overrides, []), tuple(migrate_overrides(overrides)))


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
