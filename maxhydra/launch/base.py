"""A job, and what every place does with jobs."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from maxhydra.config.errors import quoted
from maxhydra.record import RunDirectory, scan_metrics, series

# In a job's folder, beside the run: by what it is found again, and all that its processes print.
CLAIM, CONSOLE = ".job.json", "console.txt"


def read_claim(folder: Path, *needed: str) -> dict[str, Any] | None:
    """The claim in a job's folder; None where there is none, or one of another place, which says other things."""
    try:
        claim: dict[str, Any] = json.loads((folder / CLAIM).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    return claim if all(name in claim for name in needed) else None


@dataclasses.dataclass(frozen=True)
class Proposal:
    """One job: its number, the folder below the sweep's, and what sets it apart."""

    number: int
    folder: str
    overrides: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Shared:
    """What the jobs of a sweep have in common."""

    folder: Path
    """The sweep's; each job has a folder of its own below."""
    fixed: tuple[str, ...]
    """Overrides of every job."""
    config_dir: str | None
    """A further folder of options."""

    def path(self, proposal: Proposal) -> Path:
        return self.folder / proposal.folder

    def overrides(self, proposal: Proposal) -> list[str]:
        """All of a job's overrides, the place of its folder among them."""
        place = [f"run.outputs={quoted(str(self.folder))}", f"run.name={quoted(proposal.folder)}"]
        return [*self.fixed, *proposal.overrides, *place]


@dataclasses.dataclass
class Job:
    """A job that was started. What became of it is read from the run's folder."""

    proposal: Proposal
    run: RunDirectory
    restarts: int = 0
    read: int = 0
    """Bytes of its metrics that were looked at."""

    def news(self, name: str) -> Iterator[tuple[int, float]]:
        """Steps and values of a metric since the last look; from the start again where a job has cut its file back."""
        path = self.run.metrics_path
        if path.exists() and path.stat().st_size < self.read:
            self.read = 0
        scan = scan_metrics(path, start=self.read)
        self.read = scan.end
        return zip(*series(scan.rows, name), strict=True)

    def last(self, name: str) -> float | None:
        """The last value that was logged of a metric."""
        values = series(scan_metrics(self.run.metrics_path).rows, name)[1]
        return values[-1] if values else None

    def status(self) -> str:
        """What the run says of itself; `failed` where it never came to say anything."""
        return str(self.run.read()["status"]) if self.run.exists() else "failed"

    def reason(self) -> str:
        """Why it ended as it did."""
        return str(self.run.read().get("reason") or "it does not say why") if self.run.exists() else "it did not begin"


class JobBackend(Protocol):
    """Starts jobs at a place, finds them again, and ends them."""

    def prepare(self, proposal: Proposal) -> None:
        """Write what the job needs; ConfigError where its config is wrong. Nothing is started."""
        ...

    def render(self, proposals: Sequence[Proposal]) -> str:
        """What `start` would hand to the place, as text. Nothing is written, and nobody asked."""
        ...

    def start(self, proposals: Sequence[Proposal]) -> Sequence[Job]:
        """Start jobs that are prepared. ConfigError where the place refuses them."""
        ...

    def find(self, proposal: Proposal) -> Job | None:
        """A job that waits or runs already."""
        ...

    def past(self, proposal: Proposal) -> Job | None:
        """A job that was started before, whatever became of it."""
        ...

    def is_running(self, job: Job) -> bool:
        """Whether it is not over: it may wait for its turn as well."""
        ...

    def may_restart(self, job: Job) -> bool:
        """Whether a job that was interrupted should go on, or was ended on purpose."""
        ...

    def state(self, job: Job) -> str:
        """What the place says of it, for a person; empty where it has nothing to add to the run's own status."""
        ...

    def end(self, jobs: Sequence[Job]) -> None:
        """Ask them to save and end."""
        ...

    def leave(self, jobs: Sequence[Job]) -> str:
        """The controller was interrupted: end what cannot be left alone; what became of the jobs, for a person."""
        ...
