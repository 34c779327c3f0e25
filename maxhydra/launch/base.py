"""Jobs, trials, launcher settings, and the `JobBackend` interface that every launcher implements.

Settings are hydra.launcher in a config, and `launcher` in sweep.json.
"""

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from maxhydra.config.errors import Problem, did_you_mean, last_of_each_key, quoted
from maxhydra.record import RunDirectory, scan_metrics, series

KEY = "hydra.launcher"
# Override with which a run continues on another number of devices with the same batch.
ELASTIC = "train.elastic=true"


@dataclasses.dataclass(frozen=True)
class LauncherSettings:
    """How a launcher starts jobs. Subclasses are frozen dataclasses of JSON-serializable values."""

    kind: ClassVar[str]

    @property
    def detached(self) -> bool:
        """True if the launcher submits jobs and returns without waiting for them."""
        return False

    @property
    def overrides(self) -> tuple[str, ...]:
        """Overrides that these settings add to every job, before its own."""
        return ()

    def grid_workers(self, jobs: int) -> int:
        """Jobs of a grid sweep that are started at a time. A cluster queues them itself, so all are submitted."""
        return jobs

    def problems(self) -> Iterator[Problem]:
        """Yield every invalid value."""
        yield from ()

    def to_json(self) -> dict[str, Any]:
        """Return the form stored in sweep.json."""
        return {"kind": self.kind, **dataclasses.asdict(self)}


def minimum_problems(settings: LauncherSettings, minimums: Mapping[str, int]) -> Iterator[Problem]:
    """Yield fields that are not integers, or below their minimum."""
    for name, minimum in minimums.items():
        value = getattr(settings, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            yield Problem(f"{KEY}.{name}", "is out of range", value, f"{minimum} or more")


def fewest_problems(settings: LauncherSettings, name: str, most: str) -> Iterator[Problem]:
    """Yield a field that is neither null nor an integer from 1 to the value of the field `most`."""
    value, limit = getattr(settings, name), getattr(settings, most)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit):
        yield Problem(f"{KEY}.{name}", "is out of range", value, f"1 to {limit} ({most}), or null")


def choice_problems(settings: LauncherSettings, accepted: Mapping[str, tuple[str, ...]]) -> Iterator[Problem]:
    """Yield fields whose value is not one of the accepted choices."""
    for name, choices in accepted.items():
        value = getattr(settings, name)
        if value not in choices:
            hint = did_you_mean(str(value), choices)
            yield Problem(f"{KEY}.{name}", "is not a valid choice", value, ", ".join(choices), hint)


def pattern_problems(settings: LauncherSettings, patterns: Mapping[str, tuple[str, str]]) -> Iterator[Problem]:
    """Yield non-null fields that do not match their pattern; `patterns` maps name -> (regex, description)."""
    for name, (pattern, description) in patterns.items():
        value = getattr(settings, name)
        if value is not None and not re.fullmatch(pattern, str(value)):
            yield Problem(f"{KEY}.{name}", "is malformed", value, description)


# Files in a job's folder: the claim, by which a backend finds the job again, and the output of its processes.
CLAIM, CONSOLE = ".job.json", "console.txt"


def read_claim(folder: Path, *required: str) -> dict[str, Any] | None:
    """Return the claim in a job's folder, or None if it is missing or was written by another backend."""
    try:
        claim: dict[str, Any] = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return claim if all(name in claim for name in required) else None


@dataclasses.dataclass(frozen=True)
class Trial:
    """One job of a sweep: its number, its folder below the sweep's, and the overrides specific to it."""

    number: int
    folder: str
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class SweepContext:
    """Settings common to all jobs of a sweep."""

    folder: Path
    """Folder of the sweep; each job has a folder below it."""
    fixed: tuple[str, ...]
    """Overrides applied to every job."""
    config_dir: str | None
    """Additional config folder (--config-dir)."""

    @property
    def flags(self) -> list[str]:
        """Flags of the commands that start the jobs."""
        return [] if self.config_dir is None else ["--config-dir", self.config_dir]

    def path(self, trial: Trial) -> Path:
        return self.folder / trial.folder

    def overrides(self, trial: Trial) -> list[str]:
        """All overrides of a job, including those that set its run folder."""
        run_folder = [f"run.outputs={quoted(str(self.folder))}", f"run.name={quoted(trial.folder)}"]
        return last_of_each_key([*self.fixed, *trial.overrides, *run_folder])


@dataclasses.dataclass
class Job:
    """A started job. Its status is read from the run folder."""

    trial: Trial
    run: RunDirectory
    restarts: int = 0
    metrics_offset: int = 0
    """Bytes of metrics.jsonl read so far."""

    def new_values(self, name: str) -> Iterator[tuple[int, float]]:
        """Steps and values of a metric logged since the last call; all of them if a resumed job truncated its file."""
        path = self.run.metrics_path
        if path.exists() and path.stat().st_size < self.metrics_offset:
            self.metrics_offset = 0
        scan = scan_metrics(path, start=self.metrics_offset)
        self.metrics_offset = scan.end
        return zip(*series(scan.rows, name), strict=True)

    def last_value(self, name: str) -> float | None:
        """Last logged value of a metric."""
        values = series(scan_metrics(self.run.metrics_path).rows, name)[1]
        return values[-1] if values else None

    def status(self) -> str:
        """Status in run.json; `failed` if the run never wrote one."""
        return str(self.run.read()["status"]) if self.run.exists() else "failed"

    def reason(self) -> str:
        """Why the run ended, from run.json."""
        return str(self.run.read().get("reason") or "no reason recorded") if self.run.exists() else "it did not start"


class JobBackend(Protocol):
    """Starts jobs on one kind of machine or cluster, finds them again, and stops them."""

    @property
    def max_jobs(self) -> int | None:
        """Number of jobs that can run at a time; None if the cluster queues those that must wait."""
        ...

    def prepare(self, trial: Trial) -> None:
        """Write the files the job needs without starting it. Raises ConfigError if its config is invalid."""
        ...

    def render(self, trials: Sequence[Trial]) -> str:
        """Return what `start` would submit, as text, without writing files or contacting the cluster."""
        ...

    def start(self, trials: Sequence[Trial]) -> Sequence[Job]:
        """Start prepared jobs. Raises ConfigError if the backend rejects them."""
        ...

    def find_active(self, trial: Trial) -> Job | None:
        """Return the trial's job if it is queued or running."""
        ...

    def find_started(self, trial: Trial) -> Job | None:
        """Return the trial's job if it was ever started, in whatever state it is now."""
        ...

    def is_running(self, job: Job) -> bool:
        """True while the job is queued or running."""
        ...

    def may_restart(self, job: Job) -> bool:
        """True if an interrupted job should be restarted, False if it was stopped on purpose."""
        ...

    def state(self, job: Job) -> str:
        """Human-readable state from the scheduler; empty if it adds nothing to the run's status."""
        ...

    def stop(self, jobs: Sequence[Job]) -> None:
        """Ask jobs to save a checkpoint and exit."""
        ...

    def on_interrupt(self, jobs: Sequence[Job]) -> str:
        """Handle an interrupted controller: stop jobs that need it, and return a message about all of them."""
        ...
