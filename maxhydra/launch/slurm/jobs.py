"""Runs as SLURM jobs. A claim in the run folder, written before submission, holds the name by which to find the job."""

import dataclasses
import json
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from maxhydra.config.compose.composer import Composer
from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import CLAIM, Job, SweepContext, Trial, read_claim
from maxhydra.launch.compose import compose_job, job_composer
from maxhydra.launch.slurm import scheduler
from maxhydra.launch.slurm.scheduler import TERMINAL_STATES, Entry, Queue
from maxhydra.launch.slurm.settings import SCRIPTS, SlurmSettings, render
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file

# SLURM's default MaxArraySize.
MAX_ARRAY_SIZE = 1000
# State of a job that was cancelled or has ended, and whose processes have not all exited: it is not running.
COMPLETING = "COMPLETING"
# States in which the cluster ended a job that neither failed nor was cancelled.
INTERRUPTED_STATES = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "TIMEOUT")


@dataclasses.dataclass
class SlurmJob(Job):
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)
    """`name` and `index` identify the job in the queue; `id` is set once it is known."""

    @property
    def key(self) -> scheduler.Key:
        return self.claim["name"], self.claim["index"]


class SlurmJobs:
    """Submits jobs to the cluster that this machine's SLURM commands talk to."""

    max_jobs: int | None = None

    def __init__(self, settings: SlurmSettings, sweep: SweepContext):
        self._settings, self._sweep = settings, sweep
        self._queue = Queue(settings.poll_seconds)
        self._composer: Composer | None = None

    def prepare(self, trial: Trial) -> None:
        if self._composer is None:
            self._composer = job_composer(self._sweep, trial)
        compose_job(self._composer, self._sweep, trial).write(self._sweep.path(trial))

    def render(self, trials: Sequence[Trial]) -> str:
        folders = [self._sweep.path(trial) for trial in trials]
        name = _safe_name(self._sweep.folder.name)
        return render(self._settings, name=name, sweep=self._sweep.folder, folders=folders)

    def start(self, trials: Sequence[Trial]) -> Sequence[SlurmJob]:
        for trial in trials:
            self._wait_until_ended(trial)
        return [job for batch in _array_batches(trials) for job in self._submit(batch)]

    def _wait_until_ended(self, trial: Trial) -> None:
        """Wait for an earlier job of the trial that is about to end, such as one that saves after a cancel."""
        job = self.find_started(trial)
        while job is not None and (entry := self._entry(job)) is not None and entry.state == COMPLETING:
            time.sleep(self._settings.poll_seconds)

    def _submit(self, trials: Sequence[Trial]) -> list[SlurmJob]:
        """Submit one job or an array. Claims are written first, so that a restarted controller finds jobs by name."""
        name = f"{_safe_name(self._sweep.folder.name)}-{uuid.uuid4().hex[:8]}"
        jobs = [self._job(trial, {"name": name, "index": index}) for index, trial in enumerate(trials)]
        for job in jobs:
            _write_claim(job)
        folder = self._sweep.folder / SCRIPTS
        folder.mkdir(exist_ok=True)
        script = folder / f"{name}.sh"
        folders = [job.run.path for job in jobs]
        replace_file(script, render(self._settings, name=name, sweep=self._sweep.folder, folders=folders))
        try:
            identity = scheduler.submit(script)
        except ConfigError:
            for job in jobs:
                (job.run.path / CLAIM).unlink()
            raise
        self._queue.invalidate()
        for job in jobs:
            job.claim["id"] = f"{identity}_{job.claim['index']}" if len(jobs) > 1 else identity
            _write_claim(job)
        return jobs

    def find_active(self, trial: Trial) -> SlurmJob | None:
        job = self.find_started(trial)
        entry = None if job is None else self._entry(job)
        return None if entry is None or entry.state in (*TERMINAL_STATES, COMPLETING) else job

    def find_started(self, trial: Trial) -> SlurmJob | None:
        claim = read_claim(self._sweep.path(trial), "name", "index")
        return None if claim is None else self._job(trial, claim)

    def is_running(self, job: Job) -> bool:
        entry = self._entry(job)
        return entry is not None and entry.state not in TERMINAL_STATES

    def may_restart(self, job: Job) -> bool:
        entry = self._last_entry(job)
        return entry is None or entry.state in INTERRUPTED_STATES

    def state(self, job: Job) -> str:
        entry = self._last_entry(job)
        return "" if entry is None else str(entry)

    def stop(self, jobs: Sequence[Job]) -> None:
        """Cancel queued jobs; running ones get SIGTERM, and the cluster's KillWait seconds to save."""
        entries = [
            entry for job in jobs if (entry := self._entry(job)) is not None and entry.state not in TERMINAL_STATES
        ]
        if entries:
            scheduler.cancel([entry.id for entry in entries])
            self._queue.invalidate()

    def on_interrupt(self, jobs: Sequence[Job]) -> str:
        """Leave the jobs to the cluster."""
        claims = [_as_slurm_job(job).claim for job in jobs]
        return f"{len(jobs)} jobs remain in SLURM: {' '.join(claim.get('id', claim['name']) for claim in claims)}"

    def _job(self, trial: Trial, claim: dict[str, Any]) -> SlurmJob:
        return SlurmJob(trial, RunDirectory(self._sweep.path(trial), writes=False), claim=claim)

    def _entry(self, job: Job) -> Entry | None:
        return self._queue.find(_as_slurm_job(job).key)

    def _last_entry(self, job: Job) -> Entry | None:
        """Entry in the queue, or in accounting if the job has left the queue."""
        if (entry := self._entry(job)) is not None:
            return entry
        identity = _as_slurm_job(job).claim.get("id")
        state = None if identity is None else scheduler.accounting_state(identity)
        return None if identity is None or state is None else Entry(identity, state)


def _as_slurm_job(job: Job) -> SlurmJob:
    assert isinstance(job, SlurmJob)
    return job


def _write_claim(job: SlurmJob) -> None:
    replace_file(job.run.path / CLAIM, json.dumps(job.claim))


def _array_batches(trials: Sequence[Trial]) -> Iterator[Sequence[Trial]]:
    for start in range(0, len(trials), MAX_ARRAY_SIZE):
        yield trials[start : start + MAX_ARRAY_SIZE]


def _safe_name(name: str) -> str:
    """A name that needs no quoting, short enough for a column of squeue."""
    return re.sub(r"[^-\w.]", "_", name)[:40]
