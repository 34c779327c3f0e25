"""Jobs as processes of this machine, each an ordinary command in a session of its own.

They outlive the controller. What it needs to find them again is beside the run: .job.json with the process, and the
run's own run.json.
"""

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from maxhydra.launch.base import CLAIM, CONSOLE, Job, Proposal, Shared, read_claim
from maxhydra.launch.settings import LauncherSettings
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file
from maxhydra.record.liveness import is_alive, process_start

# What a claim says of the process.
CLAIMED = ("host", "pid", "pid_started")
CLAIMING = "import sys; from maxhydra.launch.local import claim_and_become; claim_and_become(sys.argv[1], sys.argv[2:])"


@dataclasses.dataclass(frozen=True)
class LocalSettings(LauncherSettings):
    """This machine: nothing to set."""

    kind: ClassVar[str] = "local"


@dataclasses.dataclass
class LocalJob(Job):
    process: subprocess.Popen | None = None
    """None for one that another controller started, and that is known by its claim."""
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.claim["pid"]) if self.process is None else self.process.pid


class LocalJobs:
    """Processes of this machine."""

    def __init__(self, settings: LocalSettings, shared: Shared):
        self._shared = shared

    def prepare(self, proposal: Proposal) -> None:
        """The command composes and checks its config itself."""

    def render(self, proposals: Sequence[Proposal]) -> str:
        return "".join(shlex.join(self.command(proposal)) + "\n" for proposal in proposals)

    def start(self, proposals: Sequence[Proposal]) -> Sequence[LocalJob]:
        return [self._start(proposal) for proposal in proposals]

    def _start(self, proposal: Proposal) -> LocalJob:
        path = self._shared.path(proposal)
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
        return LocalJob(proposal, RunDirectory(path, writes=False), process=process)

    def command(self, proposal: Proposal) -> list[str]:
        """The command of a job, which a person could type as well."""
        config_dir = [] if self._shared.config_dir is None else ["--config-dir", self._shared.config_dir]
        return [sys.executable, "-m", "maxhydra", *config_dir, *self._shared.overrides(proposal)]

    def find(self, proposal: Proposal) -> LocalJob | None:
        job = self.past(proposal)
        return job if job is not None and self.is_running(job) else None

    def past(self, proposal: Proposal) -> LocalJob | None:
        path = self._shared.path(proposal)
        claim = read_claim(path, *CLAIMED)
        return None if claim is None else LocalJob(proposal, RunDirectory(path, writes=False), claim=claim)

    def is_running(self, job: Job) -> bool:
        assert isinstance(job, LocalJob)
        if job.process is not None:
            return job.process.poll() is None
        return bool(is_alive(*(job.claim[name] for name in CLAIMED)))

    def may_restart(self, job: Job) -> bool:
        return True

    def state(self, job: Job) -> str:
        return ""

    def end(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert isinstance(job, LocalJob)
            if self.is_running(job):
                os.kill(job.pid, signal.SIGTERM)

    def leave(self, jobs: Sequence[Job]) -> str:
        """They would keep this machine busy with nobody watching."""
        self.end(jobs)
        return f"{len(jobs)} jobs were asked to save and end"


def claim_and_become(path: str, command: list[str]) -> None:
    """Write down which process this is, and go on as the job's command."""
    claim = dict(zip(CLAIMED, (socket.gethostname(), os.getpid(), process_start(os.getpid())), strict=True))
    replace_file(Path(path) / CLAIM, json.dumps(claim))
    os.execv(command[0], command)
