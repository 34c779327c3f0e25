"""Proposals by optuna: a study on disk, a sampler that learns from it, a pruner that ends what does badly."""

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
from optuna.trial import FrozenTrial, Trial, TrialState

from maxhydra.config.compose.resolvers import job_folder
from maxhydra.config.migrations import migrate_overrides
from maxhydra.launch.base import Proposal
from maxhydra.sweep.plan import Settings, SweepPlan
from maxhydra.sweep.space import distributions, grid_values, overrides_of
from maxhydra.sweep.trials import TrialStatus, told

optuna.logging.set_verbosity(logging.WARNING)
warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)

# Of several objectives, as many of the jobs that none beats in all are shown.
SHOWN = 5
STATES = {
    TrialStatus.finished: TrialState.COMPLETE,
    TrialStatus.failed: TrialState.FAIL,
    TrialStatus.pruned: TrialState.PRUNED,
}


class SearchProposals:
    """Trials of a study, numbered from 0 in the order in which they were proposed."""

    def __init__(self, plan: SweepPlan):
        settings = plan.settings
        self._plan = plan
        self._space = self.check(plan)
        grid = _combinations(self._space) if settings.sampler == "grid" else []
        self._trials = len(grid) or settings.trials
        self._study = optuna.create_study(
            study_name=plan.folder.name,
            storage=_storage(settings, plan.folder),
            pruner=_pruner(settings),
            directions=[optuna.study.StudyDirection[name.upper()] for name in plan.directions],
            load_if_exists=True,
        )
        # A sampler that begins anew with the same seed would draw what it has drawn before.
        before = len(self._study.get_trials(deepcopy=False))
        self._study.sampler = _sampler(settings, None if settings.seed is None else settings.seed + before)
        for params in grid:
            self._study.enqueue_trial(params, skip_if_exists=True)

    @staticmethod
    def check(plan: SweepPlan) -> dict[str, BaseDistribution]:
        """What is searched; ConfigError where it cannot be."""
        return distributions(plan.space, grid=plan.settings.sampler == "grid")

    def unfinished(self) -> list[Proposal]:
        return [_proposal(trial) for trial in self._study.get_trials(deepcopy=False, states=[TrialState.RUNNING])]

    def next(self) -> Proposal | None:
        proposed = [trial for trial in self._study.get_trials(deepcopy=False) if trial.state is not TrialState.WAITING]
        if len(proposed) >= self._trials:
            return None
        return _proposal(self._study.ask(self._space))

    def report(self, proposal: Proposal, step: int, value: float) -> bool:
        trial = self._trial(proposal)
        if step not in self._study.get_trials(deepcopy=False)[proposal.number].intermediate_values:
            trial.report(value, step)
        return trial.should_prune()

    def tell(self, proposal: Proposal, fate: TrialStatus, values: Sequence[float]) -> None:
        told = list(values) if fate is TrialStatus.finished else None
        self._study.tell(proposal.number, told, state=STATES[fate])

    def counts(self) -> Mapping[TrialStatus, int]:
        states = [trial.state for trial in self._study.get_trials(deepcopy=False)]
        return {fate: states.count(state) for fate, state in STATES.items()}

    def summary(self) -> str:
        """The best, with the command that runs it again."""
        counts = self.counts()
        lines = [told(counts)]
        if not counts[TrialStatus.finished]:
            return lines[0]
        for trial in self._study.best_trials[:SHOWN]:
            values = zip(self._plan.objectives, trial.values, strict=True)
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values)
            command = shlex.join(["maxhydra", *self._plan.fixed, *migrate_overrides(overrides_of(trial.params))])
            lines.append(f"best: job {trial.number}, {shown}\n      {command}")
        return "\n".join(lines)

    def _trial(self, proposal: Proposal) -> Trial:
        return Trial(self._study, self._study.get_trials(deepcopy=False)[proposal.number]._trial_id)


def _combinations(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    values = [grid_values(distribution) for distribution in space.values()]
    return [dict(zip(space, chosen, strict=True)) for chosen in itertools.product(*values)]


def _proposal(trial: Trial | FrozenTrial) -> Proposal:
    overrides = overrides_of(trial.params)
    return Proposal(trial.number, job_folder(trial.number, overrides, []), tuple(migrate_overrides(overrides)))


def _storage(settings: Settings, folder: Path) -> BaseStorage:
    if settings.storage == "sqlite":
        return RDBStorage(f"sqlite:///{folder / 'study.db'}")
    return JournalStorage(JournalFileBackend(str(folder / "study.journal")))


def _sampler(settings: Settings, seed: int | None) -> optuna.samplers.BaseSampler:
    samplers = optuna.samplers
    match settings.sampler:
        case "tpe":
            # Trials under way count as bad ones near by, so that workers do not all try the same.
            return samplers.TPESampler(
                seed=seed, n_startup_trials=settings.startup_trials, constant_liar=True, multivariate=True
            )
        case "cmaes":
            return samplers.CmaEsSampler(seed=seed, n_startup_trials=settings.startup_trials)
        case "nsga2":
            return samplers.NSGAIISampler(seed=seed)
        case _:  # A grid is drawn up beforehand.
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
