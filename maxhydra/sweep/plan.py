"""sweep.json: all that is needed to go on with a sweep in another process."""

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.config.migrations import migrate_overrides
from maxhydra.launch.base import Proposal, Shared
from maxhydra.launch.local import LocalSettings
from maxhydra.launch.registry import read_launcher
from maxhydra.launch.settings import LauncherSettings
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file

FILE = "sweep.json"
# There while a sweep is not to start jobs: whoever cancels it is not the process that runs it.
CANCELLED = ".cancelled"
LOCAL = LocalSettings()
SAMPLERS = ("tpe", "cmaes", "random", "grid", "nsga2")
PRUNERS = ("none", "asha", "hyperband", "median")
STORAGES = ("journal", "sqlite")
DIRECTIONS = ("minimize", "maximize")
# What each number must at least be.
LEAST = {"trials": 1, "workers": 1, "min_steps": 1, "reduction_factor": 2}
LEAST |= {"startup_trials": 0, "max_failures": 0, "max_restarts": 0}
# numpy takes twice as much; the number of trials so far is added.
LARGEST_SEED = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Settings:
    """How a sweep searches: hydra.sweeper."""

    sampler: str = "tpe"
    """tpe, cmaes, random, grid (every combination), nsga2 (several objectives)."""
    trials: int = 20
    """Jobs in all; a grid has as many as it has combinations."""
    workers: int = 1
    """Jobs at a time; whenever one ends, the next starts."""
    pruner: str = "none"
    """none, asha, hyperband or median: ends a job early when it does worse than others did at the same step."""
    min_steps: int = 1
    """asha, hyperband: steps that every job gets. median: steps before any is ended."""
    reduction_factor: int = 3
    """asha, hyperband: one in so many goes on to so many times the steps."""
    startup_trials: int = 10
    """tpe, cmaes: jobs drawn at random first. median: jobs that none is held against."""
    objectives: tuple[str, ...] = ()
    """Metrics to search by. Empty: the config's objective."""
    directions: tuple[str, ...] = ()
    """minimize or maximize for each objective. Empty: minimize."""
    storage: str = "journal"
    """journal or sqlite: the file in the sweep's folder that keeps the trials."""
    seed: int | None = 0
    """Of the sampler. null: a new one each time."""
    max_failures: int = 3
    """Failed jobs after which no more are started."""
    max_restarts: int = 3
    """How often a job that was interrupted is started again, from its last checkpoint."""

    def problems(self) -> Iterator[Problem]:
        for name, accepted in (("sampler", SAMPLERS), ("pruner", PRUNERS), ("storage", STORAGES)):
            value = getattr(self, name)
            if value not in accepted:
                hint = did_you_mean(str(value), accepted)
                yield Problem(f"hydra.sweeper.{name}", "no such one", value, ", ".join(accepted), hint)
        for name, least in LEAST.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield Problem(f"hydra.sweeper.{name}", "is out of range", value, f"{least} or more")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed <= LARGEST_SEED):
            yield Problem("hydra.sweeper.seed", "is out of range", self.seed, f"0 to {LARGEST_SEED}, or null")
        for direction in self.directions:
            if direction not in DIRECTIONS:
                yield Problem("hydra.sweeper.directions", "no such one", direction, ", ".join(DIRECTIONS))
        yield from self._objective_problems()

    def _objective_problems(self) -> Iterator[Problem]:
        several = len(self.objectives) > 1
        if len(set(self.objectives)) < len(self.objectives):
            yield Problem("hydra.sweeper.objectives", "name a metric twice", list(self.objectives), "each once")
        if self.directions and len(self.directions) != max(1, len(self.objectives)):
            reason = f"are {len(self.directions)} for {max(1, len(self.objectives))} objectives"
            yield Problem("hydra.sweeper.directions", reason, list(self.directions), "one for each objective")
        if several and self.pruner != "none":
            reason = "ends jobs by one metric, and there are several objectives"
            yield Problem("hydra.sweeper.pruner", reason, self.pruner, "none")
        if several and self.sampler == "cmaes":
            yield Problem(
                "hydra.sweeper.sampler", "searches by one objective", self.sampler, "nsga2, tpe, random, grid"
            )


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep: its folder, what its jobs share, and what tells them apart."""

    folder: Path
    fixed: tuple[str, ...]
    """Overrides of every job."""
    space: dict[str, str]
    """Key -> values to search, in the syntax of the command line."""
    listed: tuple[tuple[str, ...], ...]
    """Overrides of each job where they are not searched but given."""
    folders: tuple[str, ...]
    """The folder of each job that is given."""
    objectives: tuple[str, ...]
    settings: Settings
    config_dir: str | None
    launcher: LauncherSettings = LOCAL
    """Where the jobs run."""

    @property
    def shared(self) -> Shared:
        """What the place needs to know of all jobs."""
        return Shared(self.folder, self.fixed, self.config_dir)

    @property
    def proposals(self) -> list[Proposal]:
        """The jobs that are given."""
        return [Proposal(number, *told) for number, told in enumerate(zip(self.folders, self.listed, strict=True))]

    @property
    def is_cancelled(self) -> bool:
        return (self.folder / CANCELLED).exists()

    @property
    def directions(self) -> tuple[str, ...]:
        return self.settings.directions or ("minimize",) * len(self.objectives)


def write_plan(plan: SweepPlan) -> None:
    """Keep it; ConfigError where the folder is a run's, in which nobody looks for other runs."""
    if RunDirectory(plan.folder, writes=False).exists():
        hint = "choose another"
        raise ConfigError(Problem("run.name", "is a run already, and no sweep", value=plan.folder.name, hint=hint))
    plan.folder.mkdir(parents=True, exist_ok=True)
    told = {**dataclasses.asdict(plan), "folder": None, "launcher": plan.launcher.told()}
    replace_file(plan.folder / FILE, json.dumps(told, indent=1) + "\n")


def read_plan(folder: Path) -> SweepPlan:
    """The plan of a sweep's folder; ConfigError where there is none."""
    try:
        told: dict[str, Any] = json.loads((folder / FILE).read_text(encoding="utf-8"))
        told["fixed"] = migrate_overrides(told["fixed"])
        told["listed"] = [migrate_overrides(job) for job in told["listed"]]
        settings = Settings(**_tuples(told.pop("settings")))
        launcher = read_launcher(told.pop("launcher", LOCAL.told()))
        given = {"folder": folder, "settings": settings, "space": told["space"], "launcher": launcher}
        return SweepPlan(**{**_tuples(told), **given})
    except FileNotFoundError:
        known = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
        hint = did_you_mean(folder.name, known)
        raise ConfigError(Problem(str(folder), "is no sweep", accepted=", ".join(known), hint=hint)) from None
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(Problem(str(folder / FILE), f"cannot be read: {error}")) from None


def _tuples(told: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists for what are tuples of texts, or of tuples of texts."""

    def fixed(value: Any) -> Any:
        return tuple(fixed(item) for item in value) if isinstance(value, list) else value

    return {name: fixed(value) for name, value in told.items()}
