"""Jobs as local processes, each an ordinary command in its own session.

Processes outlive the controller. A restarted controller finds them by .job.json, which identifies the process, and by
run.json.
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

from maxhydra.launch.base import CLAIM, CONSOLE, Job, LauncherSettings, SweepContext, Trial, read_claim
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import is_alive, process_start, replace_file

# Keys of the claim that identify the process.
CLAIMED = ("host", "pid", "pid_started")
CLAIMING = "import sys; from maxhydra.launch.local import claim_and_become; claim_and_become(sys.argv[1], sys.argv[2:])"


@dataclasses.dataclass(frozen=True)
class LocalSettings(LauncherSettings):
    """The local machine has no settings."""

    kind: ClassVar[str] = "local"


@dataclasses.dataclass
class LocalJob(Job):
    process: subprocess.Popen | None = None
    """None if another controller started the job, which is then identified by its claim."""
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def pid(self) -> int:
        return int(self.claim["pid"]) if self.process is None else self.process.pid


class LocalJobs:
    """Runs jobs as processes on this machine."""

    def __init__(self, settings: LocalSettings, sweep: SweepContext):
        self._sweep = sweep

    def prepare(self, trial: Trial) -> None:
        """Do nothing: the command composes and validates its config itself."""

    def render(self, trials: Sequence[Trial]) -> str:
        return "".join(shlex.join(self.command(trial)) + "\n" for trial in trials)

    def start(self, trials: Sequence[Trial]) -> Sequence[LocalJob]:
        return [self._start(trial) for trial in trials]

    def _start(self, trial: Trial) -> LocalJob:
        path = self._sweep.path(trial)
        path.mkdir(parents=True, exist_ok=True)
        with open(path / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                # The job writes its claim before anything else, so a controller that is killed here leaves no
                # unclaimed job behind.
                [sys.executable, "-c", CLAIMING, str(path), *self.command(trial)],
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return LocalJob(trial, RunDirectory(path, writes=False), process=process)

    def command(self, trial: Trial) -> list[str]:
        """Command line of a job; it can also be run manually."""
        config_dir = [] if self._sweep.config_dir is None else ["--config-dir", self._sweep.config_dir]
        return [sys.executable, "-m", "maxhydra", *config_dir, *self._sweep.overrides(trial)]

    def find_active(self, trial: Trial) -> LocalJob | None:
        job = self.find_started(trial)
        return job if job is not None and self.is_running(job) else None

    def find_started(self, trial: Trial) -> LocalJob | None:
        path = self._sweep.path(trial)
        claim = read_claim(path, *CLAIMED)
        return None if claim is None else LocalJob(trial, RunDirectory(path, writes=False), claim=claim)

    def is_running(self, job: Job) -> bool:
        assert isinstance(job, LocalJob)
        if job.process is not None:
            return job.process.poll() is None
        return bool(is_alive(*(job.claim[name] for name in CLAIMED)))

    def may_restart(self, job: Job) -> bool:
        return True

    def state(self, job: Job) -> str:
        return ""

    def stop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert isinstance(job, LocalJob)
            if self.is_running(job):
                os.kill(job.pid, signal.SIGTERM)

    def on_interrupt(self, jobs: Sequence[Job]) -> str:
        """Stop the jobs: without a controller they would occupy this machine unattended."""
        self.stop(jobs)
        return f"{len(jobs)} jobs were asked to save and exit"


def claim_and_become(path: str, command: list[str]) -> None:
    """Write the claim of this process, then exec the job's command."""
    claim = dict(zip(CLAIMED, (socket.gethostname(), os.getpid(), process_start(os.getpid())), strict=True))
    replace_file(Path(path) / CLAIM, json.dumps(claim))
    os.execv(command[0], command)
