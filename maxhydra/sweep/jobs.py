"""Jobs as processes of this machine, each an ordinary command in a session of its own.

They outlive the controller. What it needs to find them again is beside the run: .job.json with the process, and the
run's own run.json.
"""

import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from maxhydra.record import RunDirectory, scan_metrics, series
from maxhydra.record.files import replace_file
from maxhydra.record.process import is_alive, process_start
from maxhydra.sweep.plan import Plan
from maxhydra.sweep.proposals import Proposal

CLAIM, CONSOLE = ".job.json", "console.txt"
CLAIMING = "import sys; from maxhydra.sweep.jobs import claim_and_become; claim_and_become(sys.argv[1], sys.argv[2:])"


@dataclasses.dataclass
class Job:
    """A job under way."""

    proposal: Proposal
    run: RunDirectory
    process: subprocess.Popen | None
    """None for one that another controller started."""
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

    @property
    def pid(self) -> int:
        return int(_claimed(self.run.path)["pid"]) if self.process is None else self.process.pid


class Jobs(Protocol):
    """Starts jobs, finds them again, and ends them."""

    def start(self, proposal: Proposal) -> Job: ...

    def find(self, proposal: Proposal) -> Job | None:
        """A job that runs already."""
        ...

    def past(self, proposal: Proposal) -> Job | None:
        """A job that was started before, whatever became of it."""
        ...

    def is_running(self, job: Job) -> bool: ...

    def end(self, job: Job) -> None:
        """Ask it to save and end."""
        ...


class LocalJobs:
    """Processes of this machine."""

    def __init__(self, plan: Plan):
        self._plan = plan

    def start(self, proposal: Proposal) -> Job:
        path = self._plan.folder / proposal.folder
        path.mkdir(parents=True, exist_ok=True)
        with open(path / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                # The job claims its folder itself before it is anything else: a controller that is killed now leaves
                # no job unclaimed.
                [sys.executable, "-c", CLAIMING, str(path), *self.command(proposal)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Job(proposal, RunDirectory(path, writes=False), process)

    def command(self, proposal: Proposal) -> list[str]:
        """The command of a job, which a person could type as well."""
        plan = self._plan
        place = [f"run.outputs='{plan.folder}'", f"run.name='{proposal.folder}'"]
        config_dir = [] if plan.config_dir is None else ["--config-dir", plan.config_dir]
        return [sys.executable, "-m", "maxhydra", *config_dir, *plan.fixed, *proposal.overrides, *place]

    def find(self, proposal: Proposal) -> Job | None:
        job = self.past(proposal)
        return job if job is not None and self.is_running(job) else None

    def past(self, proposal: Proposal) -> Job | None:
        path = self._plan.folder / proposal.folder
        return Job(proposal, RunDirectory(path, writes=False), None) if (path / CLAIM).exists() else None

    def is_running(self, job: Job) -> bool:
        if job.process is not None:
            return job.process.poll() is None
        claim = _claimed(job.run.path)
        return bool(is_alive(claim["host"], claim["pid"], claim["pid_started"]))

    def end(self, job: Job) -> None:
        if self.is_running(job):
            os.kill(job.pid, signal.SIGTERM)


def claim_and_become(path: str, command: list[str]) -> None:
    """Write down which process this is, and go on as the job's command."""
    claim = {"pid": os.getpid(), "pid_started": process_start(os.getpid()), "host": socket.gethostname()}
    replace_file(Path(path) / CLAIM, json.dumps(claim))
    os.execv(command[0], command)


def _claimed(path: Path) -> dict[str, Any]:
    told: dict[str, Any] = json.loads((path / CLAIM).read_text(encoding="utf-8"))
    return told
