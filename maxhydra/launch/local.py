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
from functools import cached_property, partial
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.base import (
    CLAIM,
    CONSOLE,
    ELASTIC,
    KEY,
    Job,
    LauncherSettings,
    SweepContext,
    Trial,
    fewest_problems,
    minimum_problems,
    read_claim,
)
from maxhydra.launch.gpus import GpuPool, visible_gpus
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import is_alive, process_start, replace_file
from maxhydra.record.processes import die_with_parent

# Keys of the claim that identify the process.
CLAIMED = ("host", "pid", "pid_started")
CLAIMING = "import sys; from maxhydra.launch.local import claim_and_become; claim_and_become(*sys.argv[1:])"


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
    gpus_per_job: int | None = None
    """GPUs of each job, the only ones it sees (CUDA_VISIBLE_DEVICES); jobs wait for free GPUs. null: all jobs see all
    GPUs."""
    jobs_per_gpu: int = 1
    """gpus_per_job=1: jobs that share a GPU, each with an equal part of its memory."""
    parallel_jobs: int | None = None
    """Maximum number of jobs that run at a time. null: one; with gpus_per_job, as many as the GPUs allow."""

    @property
    def overrides(self) -> tuple[str, ...]:
        return () if self.min_processes is None else (ELASTIC,)

    def grid_workers(self, jobs: int) -> int:
        return self.parallel_jobs or (1 if self.gpus_per_job is None else jobs)

    def problems(self) -> Iterator[Problem]:
        yield from minimum_problems(self, {"processes": 1, "max_restarts": 0, "jobs_per_gpu": 1})
        optional = ("gpus_per_job", "parallel_jobs")
        invalid = list(minimum_problems(self, {name: 1 for name in optional if getattr(self, name) is not None}))
        yield from invalid
        yield from fewest_problems(self, "min_processes", "processes")
        if invalid:
            return
        if self.gpus_per_job is not None and self.gpus_per_job % self.processes:
            reason = f"cannot be divided among the {self.processes} processes of a job"
            yield Problem(f"{KEY}.gpus_per_job", reason, self.gpus_per_job, f"a multiple of {self.processes}")
        if self.jobs_per_gpu != 1 and self.gpus_per_job != 1:
            yield Problem(f"{KEY}.jobs_per_gpu", f"requires {KEY}.gpus_per_job=1", self.jobs_per_gpu, "1")


@dataclasses.dataclass
class LocalJob(Job):
    process: subprocess.Popen | None = None
    """None if another controller started the job, which is then identified by its claim."""
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: Sequence[str] = ()
    """GPUs assigned to the job; empty if jobs see all of them."""

    @property
    def pid(self) -> int:
        return int(self.claim["pid"]) if self.process is None else self.process.pid


class LocalJobs:
    """Runs jobs as processes on this machine."""

    def __init__(self, settings: LocalSettings, sweep: SweepContext):
        self._settings, self._sweep = settings, sweep
        self._jobs: list[LocalJob] = []
        """Jobs that this controller started or found, whose GPUs are occupied while they run."""

    @cached_property
    def _gpus(self) -> GpuPool | None:
        """None if jobs are not restricted to some GPUs. Detected when jobs start: `status` works on any machine."""
        settings = self._settings
        if settings.gpus_per_job is None:
            return None
        return GpuPool(visible_gpus(os.environ), per_job=settings.gpus_per_job, jobs_per_gpu=settings.jobs_per_gpu)

    @property
    def max_jobs(self) -> int | None:
        limits = [self._settings.parallel_jobs, None if self._gpus is None else self._gpus.max_jobs]
        return min((limit for limit in limits if limit is not None), default=None)

    def prepare(self, trial: Trial) -> None:
        """Do nothing: the command composes and validates its config itself."""

    def render(self, trials: Sequence[Trial]) -> str:
        return "".join(shlex.join(self.command(trial)) + "\n" for trial in trials)

    def start(self, trials: Sequence[Trial]) -> Sequence[LocalJob]:
        return [self._start(trial) for trial in trials]

    def _start(self, trial: Trial) -> LocalJob:
        path = self._sweep.path(trial)
        path.mkdir(parents=True, exist_ok=True)
        gpus, variables = self._assign_gpus()
        with open(path / CONSOLE, "ab") as console:
            process = subprocess.Popen(
                # The job writes its claim before anything else, so a controller that is killed here leaves no
                # unclaimed job behind.
                [sys.executable, "-c", CLAIMING, str(path), json.dumps(gpus), *self.command(trial)],
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        job = LocalJob(trial, RunDirectory(path, writes=False), process=process, gpus=gpus)
        self._jobs.append(job)
        return job

    def _assign_gpus(self) -> tuple[list[str], dict[str, str]]:
        """GPUs of the next job, and the variables that restrict it to them."""
        if self._gpus is None:
            return [], {}
        self._jobs = [job for job in self._jobs if self.is_running(job)]
        gpus = self._gpus.assign(job.gpus for job in self._jobs)
        return gpus, self._gpus.variables(gpus)

    def command(self, trial: Trial) -> list[str]:
        """Command line of a job; it can also be run manually."""
        command = [sys.executable, "-m", "maxhydra", *self._sweep.flags, *self._sweep.overrides(trial)]
        if self._settings.processes == 1:
            return command
        return [sys.executable, "-m", "maxhydra.launch.local", json.dumps(self._settings.to_json()), *command]

    def find_active(self, trial: Trial) -> LocalJob | None:
        job = self.find_started(trial)
        if job is None or not self.is_running(job):
            job = self._find_session(trial)
        if job is not None:
            self._jobs.append(job)
        return job

    def _find_session(self, trial: Trial) -> LocalJob | None:
        """Find a job that no controller started: one in the process of its sweep, or a run that a user resumed."""
        run = RunDirectory(self._sweep.path(trial), writes=False)
        if not run.exists() or (facts := run.read())["status"] != "running":
            return None
        job = LocalJob(trial, run, claim={name: facts["sessions"][-1][name] for name in CLAIMED})
        return job if self.is_running(job) else None

    def find_started(self, trial: Trial) -> LocalJob | None:
        path = self._sweep.path(trial)
        claim = read_claim(path, *CLAIMED)
        if claim is None:
            return None
        return LocalJob(trial, RunDirectory(path, writes=False), claim=claim, gpus=claim.get("gpus", ()))

    def is_running(self, job: Job) -> bool:
        assert isinstance(job, LocalJob)
        if job.process is not None:
            return job.process.poll() is None
        return bool(is_alive(*(job.claim[name] for name in CLAIMED)))

    def may_restart(self, job: Job) -> bool:
        return True

    def state(self, job: Job) -> str:
        assert isinstance(job, LocalJob)
        return f"gpu {','.join(job.gpus)}" if job.gpus and self.is_running(job) else ""

    def stop(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            assert isinstance(job, LocalJob)
            if self.is_running(job):
                os.kill(job.pid, signal.SIGTERM)

    def on_interrupt(self, jobs: Sequence[Job]) -> str:
        """Stop the jobs: without a controller they would occupy this machine unattended."""
        self.stop(jobs)
        return f"{len(jobs)} jobs were asked to save and exit"


def claim_and_become(path: str, gpus: str, *command: str) -> None:
    """Write the claim of this process with the GPUs (JSON) that it occupies, then exec the job's command."""
    claim = dict(zip(CLAIMED, (socket.gethostname(), os.getpid(), process_start(os.getpid())), strict=True))
    replace_file(Path(path) / CLAIM, json.dumps({**claim, "gpus": json.loads(gpus)}))
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
