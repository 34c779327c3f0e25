"""Jobs as local processes, each an ordinary command in its own session.

Processes outlive the controller. A restarted controller finds them by .job.json, which identifies the process, and by
run.json. A job of several processes is `python -m maxhydra.launch.local SETTINGS COMMAND`: it starts the command in
all of them, as a cluster, forwards signals to them, and restarts all if one is lost.
"""

import dataclasses
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.base import (
    CLAIM,
    CONSOLE,
    ELASTIC,
    Job,
    LauncherSettings,
    SweepContext,
    Trial,
    fewest_problems,
    minimum_problems,
    read_claim,
)
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import is_alive, process_start, replace_file
from maxhydra.record.processes import die_with_parent

# Keys of the claim that identify the process.
CLAIMED = ("host", "pid", "pid_started")
CLAIMING = "import sys; from maxhydra.launch.local import claim_and_become; claim_and_become(sys.argv[1], sys.argv[2:])"


@dataclasses.dataclass(frozen=True)
class LocalSettings(LauncherSettings):
    """hydra.launcher with hydra/launcher=local: each job is a run in one or more processes on this machine."""

    kind: ClassVar[str] = "local"

    processes: int = 1
    """Processes per job, which form a cluster and share the machine's GPUs evenly."""
    max_restarts: int = 3
    """processes > 1: restarts of a job from its newest checkpoint after one of its processes was lost."""
    min_processes: int | None = None
    """processes > 1: restart on the next smaller number of processes that the mesh and the batch accept, at least this
    many, with train.elastic=true. null: on the same number."""

    @property
    def overrides(self) -> tuple[str, ...]:
        return () if self.min_processes is None else (ELASTIC,)

    def problems(self) -> Iterator[Problem]:
        yield from minimum_problems(self, {"processes": 1, "max_restarts": 0})
        yield from fewest_problems(self, "min_processes", "processes")


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
        self._settings, self._sweep = settings, sweep

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
        command = [sys.executable, "-m", "maxhydra", *self._sweep.flags, *self._sweep.overrides(trial)]
        if self._settings.processes == 1:
            return command
        return [sys.executable, "-m", "maxhydra.launch.local", json.dumps(self._settings.to_json()), *command]

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


# Exit codes: an invalid config, and a lost process (runtime/peers.py), after which a run resumes.
WRONG_CONFIG, LOST = 2, os.EX_TEMPFAIL
FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
# Exit codes of processes that saved after a signal.
SAVED = tuple(128 + number for number in FORWARDED)
# Time in which the other processes notice that one is lost, and record it; those that do not, such as stopped ones or
# ones that still wait for it to connect, are killed.
NOTICE_SECONDS = 60.0
POLL_SECONDS = 0.1


class Cluster:
    """Runs a command in several processes of this machine, and restarts all of them if one is lost."""

    def __init__(self, settings: LocalSettings, command: Sequence[str]):
        self._settings, self._command = settings, list(command)
        self._processes: list[subprocess.Popen] = []
        self._is_stopping = False

    def run(self) -> int:
        """Run to the end, with restarts; returns the exit code of the job."""
        for number in FORWARDED:
            signal.signal(number, self._forward)
        count, code, restarts = self._settings.processes, LOST, 0
        while True:
            code = self._run_once(count)
            if code == WRONG_CONFIG and restarts and count > (self._settings.min_processes or count):
                # This number of processes divides neither the mesh nor the batch.
                count -= 1
                continue
            if code != LOST or self._is_stopping or restarts == self._settings.max_restarts:
                return code
            restarts += 1
            count = max(count - 1, self._settings.min_processes or count)
            limit = f"restart {restarts} of {self._settings.max_restarts}"
            print(f"maxhydra: a process was lost; {limit}, in {count} processes", flush=True)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        for process in self._processes:
            process.send_signal(number)

    def _run_once(self, count: int) -> int:
        """Start all processes and wait for them; returns LOST if one was lost, otherwise the first exit code but 0."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self._processes = [self._start(address, count, index) for index in range(count)]
        if self._is_stopping:  # by a signal that arrived before these were started
            self._forward(signal.SIGTERM, None)
        deadline = None
        while None in (codes := [process.poll() for process in self._processes]):
            if deadline is None and any(code not in (None, 0, *SAVED) for code in codes):
                deadline = time.monotonic() + NOTICE_SECONDS
            if deadline is not None and time.monotonic() > deadline:
                for process in self._processes:
                    process.kill()
            time.sleep(POLL_SECONDS)
        failures = [code for code in codes if code in (1, WRONG_CONFIG)]
        if not failures and any(code is not None and (code == LOST or code < 0) for code in codes):
            return LOST
        return failures[0] if failures else max(code or 0 for code in codes)

    def _start(self, address: str, count: int, index: int) -> subprocess.Popen:
        cluster = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index)}
        cluster |= {"LOCAL_RANK": str(index), "LOCAL_WORLD_SIZE": str(count)}
        # If this launcher is killed, the run saves and does not hold the devices.
        end_with_launcher = partial(die_with_parent, signal.SIGTERM)
        return subprocess.Popen(self._command, env={**os.environ, **cluster}, preexec_fn=end_with_launcher)


def main(arguments: Sequence[str]) -> int:
    """Run a job of several processes: settings as JSON, and the command of each process."""
    settings = json.loads(arguments[0])
    return Cluster(
        LocalSettings(**{name: value for name, value in settings.items() if name != "kind"}), arguments[1:]
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
