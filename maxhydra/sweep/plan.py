"""The plan of a sweep, stored as sweep.json: everything needed to resume it in another process."""

import dataclasses
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from maxhydra.config.compose.overrides import SEARCHPATH
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.config.migrations import migrate_overrides
from maxhydra.config.yaml_files import display_path
from maxhydra.launch.base import LauncherSettings, SweepContext, Trial
from maxhydra.launch.local import LocalSettings
from maxhydra.launch.registry import launcher_from_json, lists_to_tuples
from maxhydra.record import RunDirectory, redact_argv
from maxhydra.record.atomic_io import NewerFormatError, migrate_format, replace_file, stamp
from maxhydra.record.facts import DEFAULT_OUTPUTS, SWEEP_FILE

FILE = SWEEP_FILE
# Format of sweep.json. 1: without `format`. 2: with `format`.
SWEEP_FORMAT = 2
# Marker file of a cancelled sweep, read by the controller, which is another process than `sweep cancel`.
CANCELLED = ".cancelled"
LOCAL = LocalSettings()
SAMPLERS = ("tpe", "cmaes", "random", "grid", "nsga2")
PRUNERS = ("none", "asha", "hyperband", "median")
STORAGES = ("journal", "sqlite")
DIRECTIONS = ("minimize", "maximize")
# Minimum of each number.
MINIMUMS = {"trials": 1, "workers": 1, "min_steps": 1, "reduction_factor": 2}
MINIMUMS |= {"startup_trials": 0, "max_failures": 0, "max_restarts": 0}
# Overrides that are set anew for every job, and so are not part of the plan.
PER_JOB = ("run.name=", "run.outputs=", "hydra.", "hydra/")
# Half of numpy's limit, because the number of earlier trials is added.
LARGEST_SEED = 2**31 - 1


def is_of_plan(line: str) -> bool:
    """Whether an override of a job is part of its sweep's plan."""
    return line.startswith(SEARCHPATH) or not line.startswith(PER_JOB)


@dataclasses.dataclass(frozen=True)
class Settings:
    """Search settings: hydra.sweeper."""

    sampler: str = "tpe"
    """tpe, cmaes, random, grid (every combination), nsga2 (several objectives)."""
    trials: int = 20
    """Total number of jobs. A grid always runs all combinations."""
    workers: int = 1
    """Jobs that run in parallel."""
    pruner: str = "none"
    """none, asha, hyperband or median: stops a job early if it is worse than others were at the same step."""
    min_steps: int = 1
    """asha, hyperband: steps that every job runs. median: steps before a job can be pruned."""
    reduction_factor: int = 3
    """asha, hyperband: one in `reduction_factor` jobs continues to `reduction_factor` times the steps."""
    startup_trials: int = 10
    """tpe, cmaes: jobs sampled at random first. median: jobs that must finish before any is pruned."""
    objectives: tuple[str, ...] = ()
    """Metrics to optimize. Empty: the config's objective."""
    directions: tuple[str, ...] = ()
    """minimize or maximize for each objective. Empty: minimize."""
    storage: str = "journal"
    """journal or sqlite: format of the study file in the sweep's folder."""
    seed: int | None = 0
    """Seed of the sampler. null: a random seed each time."""
    max_failures: int = 3
    """Number of failed jobs above which a search starts no more."""
    max_restarts: int = 3
    """Restarts of an interrupted job, each from its last checkpoint."""

    def problems(self) -> Iterator[Problem]:
        for name, accepted in (("sampler", SAMPLERS), ("pruner", PRUNERS), ("storage", STORAGES)):
            value = getattr(self, name)
            if value not in accepted:
                hint = did_you_mean(str(value), accepted)
                yield Problem(f"hydra.sweeper.{name}", "is not a valid choice", value, ", ".join(accepted), hint)
        for name, least in MINIMUMS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                yield Problem(f"hydra.sweeper.{name}", "is out of range", value, f"{least} or more")
        if self.seed is not None and (not isinstance(self.seed, int) or not 0 <= self.seed <= LARGEST_SEED):
            yield Problem("hydra.sweeper.seed", "is out of range", self.seed, f"0 to {LARGEST_SEED}, or null")
        for direction in self.directions:
            if direction not in DIRECTIONS:
                yield Problem("hydra.sweeper.directions", "is not a valid choice", direction, ", ".join(DIRECTIONS))
        yield from self._objective_problems()

    def _objective_problems(self) -> Iterator[Problem]:
        is_multi_objective = len(self.objectives) > 1
        if len(set(self.objectives)) < len(self.objectives):
            yield Problem(
                "hydra.sweeper.objectives", "contain a metric twice", list(self.objectives), "each metric once"
            )
        if self.directions and len(self.directions) != max(1, len(self.objectives)):
            reason = f"has {len(self.directions)} entries for {max(1, len(self.objectives))} objectives"
            yield Problem("hydra.sweeper.directions", reason, list(self.directions), "one for each objective")
        if is_multi_objective and self.pruner != "none":
            reason = "supports one objective, but several are set"
            yield Problem("hydra.sweeper.pruner", reason, self.pruner, "none")
        if is_multi_objective and self.sampler == "cmaes":
            yield Problem(
                "hydra.sweeper.sampler", "supports one objective only", self.sampler, "nsga2, tpe, random, grid"
            )


@dataclasses.dataclass(frozen=True)
class SweepPlan:
    """A sweep: its folder, the settings its jobs share, and the jobs or the search space."""

    folder: Path
    fixed: tuple[str, ...]
    """Overrides applied to every job."""
    space: dict[str, str]
    """Search space: key -> sweep expression in command-line syntax. Empty for a grid sweep."""
    listed: tuple[tuple[str, ...], ...]
    """Overrides of each job of a grid sweep."""
    folders: tuple[str, ...]
    """Folder of each job of a grid sweep."""
    objectives: tuple[str, ...]
    settings: Settings
    config_dir: str | None
    launcher: LauncherSettings = LOCAL

    @property
    def argument(self) -> str:
        """How a command names this sweep from the current folder: its name in outputs/, else its path."""
        folder, outputs = self.folder.resolve(), Path(DEFAULT_OUTPUTS).resolve()
        is_default = folder.is_relative_to(outputs)
        return shlex.quote(folder.relative_to(outputs).as_posix() if is_default else display_path(folder))

    @property
    def context(self) -> SweepContext:
        """Settings that the job backend needs."""
        return SweepContext(self.folder, (*self.launcher.overrides, *self.fixed), self.config_dir)

    @property
    def trials(self) -> list[Trial]:
        """Trials of a grid sweep."""
        jobs = zip(self.folders, self.listed, strict=True)
        return [Trial(number, folder, overrides) for number, (folder, overrides) in enumerate(jobs)]

    @property
    def choices(self) -> dict[str, list[str]]:
        """Overrides of a grid sweep by key, each distinct value once, in the order of the jobs."""
        lines = dict.fromkeys(line for job in self.listed for line in job)
        keys = dict.fromkeys(line.partition("=")[0] for line in lines)
        return {key: [line for line in lines if line.partition("=")[0] == key] for key in keys}

    @property
    def varied(self) -> list[str]:
        """Keys that have several values in a grid sweep."""
        return [key for key, lines in self.choices.items() if len(lines) > 1]

    @property
    def is_cancelled(self) -> bool:
        return (self.folder / CANCELLED).exists()

    @property
    def directions(self) -> tuple[str, ...]:
        return self.settings.directions or ("minimize",) * len(self.objectives)


def write_plan(plan: SweepPlan) -> None:
    """Write sweep.json. Raises ConfigError if the folder is a run, because runs are not searched for nested runs."""
    if RunDirectory(plan.folder, writes=False).exists():
        reason, hint = "is an existing run, not a sweep", "choose another name"
        raise ConfigError(Problem("run.name", reason, value=plan.folder.name, hint=hint))
    _check_secrets(plan)
    plan.folder.mkdir(parents=True, exist_ok=True)
    fields = {**dataclasses.asdict(plan), "folder": None, "launcher": plan.launcher.to_json()}
    stored = {**stamp(SWEEP_FORMAT), **fields}
    replace_file(plan.folder / FILE, json.dumps(stored, indent=1) + "\n")


def _check_secrets(plan: SweepPlan) -> None:
    """Raise ConfigError if an override contains a secret: sweep.json must be complete to resume the sweep."""
    spaces = [f"{key}={value}" for key, value in plan.space.items()]
    overrides = dict.fromkeys([*plan.fixed, *spaces, *(line for job in plan.listed for line in job)])
    keys = [line.partition("=")[0] for line in overrides if redact_argv([line]) != [line]]
    reason, hint = (
        "looks like a secret, which cannot be stored in sweep.json",
        "pass it by a variable: {}='${{oc.env:NAME}}'",
    )
    if keys:
        raise ConfigError(Problem(key, reason, hint=hint.format(key)) for key in keys)


def read_plan(folder: Path) -> SweepPlan:
    """Read the plan in a sweep's folder. Raises ConfigError if there is none."""
    try:
        found = json.loads((folder / FILE).read_text(encoding="utf-8"))
        stored = migrate_format(found, current=SWEEP_FORMAT, migrations={})
        for name in stamp(SWEEP_FORMAT):
            stored.pop(name, None)
        stored["fixed"] = migrate_overrides(stored["fixed"])
        stored["listed"] = [migrate_overrides(job) for job in stored["listed"]]
        settings = Settings(**_tuple_values(stored.pop("settings")))
        launcher = launcher_from_json(stored.pop("launcher", LOCAL.to_json()))
        fields = {"folder": folder, "settings": settings, "space": stored["space"], "launcher": launcher}
        return SweepPlan(**{**_tuple_values(stored), **fields})
    except FileNotFoundError:
        known = sorted(path.parent.name for path in folder.parent.glob(f"*/{FILE}"))
        hint = did_you_mean(folder.name, known)
        raise ConfigError(Problem(str(folder), "is not a sweep", accepted=", ".join(known), hint=hint)) from None
    except NewerFormatError as error:
        raise ConfigError(Problem(str(folder / FILE), str(error))) from None
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise ConfigError(Problem(str(folder / FILE), f"cannot be read: {error}")) from None


def _tuple_values(stored: dict[str, Any]) -> dict[str, Any]:
    return {name: lists_to_tuples(value) for name, value in stored.items()}
