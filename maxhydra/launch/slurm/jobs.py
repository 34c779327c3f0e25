"""Runs as jobs of SLURM. A claim beside the run, written before it is submitted, says by which name to find it."""

import dataclasses
import json
import re
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import CLAIM, Job, Proposal, Shared, read_claim
from maxhydra.launch.composing import Ordering
from maxhydra.launch.slurm import scheduler
from maxhydra.launch.slurm.scheduler import OVER, Entry, Queue
from maxhydra.launch.slurm.script import SCRIPTS, render
from maxhydra.launch.slurm.settings import SlurmSettings
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file

# SLURM's MaxArraySize unless a cluster has another.
LARGEST_ARRAY = 1000
# What a cluster does to a job that is not the job's fault, nor anybody's wish.
MISHAPS = ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "TIMEOUT")


@dataclasses.dataclass
class SlurmJob(Job):
    claim: dict[str, Any] = dataclasses.field(default_factory=dict)
    """name and index: where the queue has it; id, once that is known."""
    is_leaving: bool = False
    """Whether it was on its way out when it was found, as after a cancel: if that left it unfinished, it goes on."""

    @property
    def key(self) -> scheduler.Key:
        return self.claim["name"], self.claim["index"]


class SlurmJobs:
    """Jobs of the cluster that the commands of this machine speak to."""

    def __init__(self, settings: SlurmSettings, shared: Shared):
        self._settings, self._shared = settings, shared
        self._queue = Queue(settings.poll_seconds)
        self._ordering: Ordering | None = None

    def prepare(self, proposal: Proposal) -> None:
        if self._ordering is None:
            self._ordering = Ordering(self._shared)
        self._ordering.order(proposal).write(self._shared.path(proposal))

    def render(self, proposals: Sequence[Proposal]) -> str:
        folders = [self._shared.path(proposal) for proposal in proposals]
        name = _word(self._shared.folder.name)
        return render(self._settings, name=name, sweep=self._shared.folder, folders=folders)

    def start(self, proposals: Sequence[Proposal]) -> Sequence[SlurmJob]:
        return [job for part in _parts(proposals) for job in self._submit(part)]

    def _submit(self, proposals: Sequence[Proposal]) -> list[SlurmJob]:
        """One job, or an array. Claims come first: a job that nobody had time to write down is found by its name."""
        name = f"{_word(self._shared.folder.name)}-{uuid.uuid4().hex[:8]}"
        jobs = [self._job(proposal, {"name": name, "index": index}) for index, proposal in enumerate(proposals)]
        for job in jobs:
            _write_claim(job)
        folder = self._shared.folder / SCRIPTS
        folder.mkdir(exist_ok=True)
        script = folder / f"{name}.sh"
        folders = [job.run.path for job in jobs]
        replace_file(script, render(self._settings, name=name, sweep=self._shared.folder, folders=folders))
        try:
            identity = scheduler.submit(script)
        except ConfigError:
            for job in jobs:
                (job.run.path / CLAIM).unlink()
            raise
        self._queue.forget()
        for job in jobs:
            job.claim["id"] = f"{identity}_{job.claim['index']}" if len(jobs) > 1 else identity
            _write_claim(job)
        return jobs

    def find(self, proposal: Proposal) -> SlurmJob | None:
        job = self.past(proposal)
        entry = None if job is None else self._entry(job)
        if job is None or entry is None or entry.state in OVER:
            return None
        job.is_leaving = entry.state == "COMPLETING"
        return job

    def past(self, proposal: Proposal) -> SlurmJob | None:
        claim = read_claim(self._shared.path(proposal), "name", "index")
        return None if claim is None else self._job(proposal, claim)

    def is_running(self, job: Job) -> bool:
        entry = self._entry(job)
        return entry is not None and entry.state not in OVER

    def may_restart(self, job: Job) -> bool:
        entry = self._last(job)
        return entry is None or entry.state in MISHAPS or _slurm(job).is_leaving

    def state(self, job: Job) -> str:
        entry = self._last(job)
        return "" if entry is None else str(entry)

    def end(self, jobs: Sequence[Job]) -> None:
        """Those that wait leave the queue; those that run get SIGTERM, and the cluster's KillWait to save."""
        entries = [entry for job in jobs if (entry := self._entry(job)) is not None and entry.state not in OVER]
        if entries:
            scheduler.cancel([entry.id for entry in entries])
            self._queue.forget()

    def leave(self, jobs: Sequence[Job]) -> str:
        """The cluster goes on with them."""
        claims = [_slurm(job).claim for job in jobs]
        return f"{len(jobs)} jobs stay with SLURM: {' '.join(claim.get('id', claim['name']) for claim in claims)}"

    def _job(self, proposal: Proposal, claim: dict[str, Any]) -> SlurmJob:
        return SlurmJob(proposal, RunDirectory(self._shared.path(proposal), writes=False), claim=claim)

    def _entry(self, job: Job) -> Entry | None:
        return self._queue.find(_slurm(job).key)

    def _last(self, job: Job) -> Entry | None:
        """What the scheduler says, or what accounting remembers."""
        if (entry := self._entry(job)) is not None:
            return entry
        identity = _slurm(job).claim.get("id")
        state = None if identity is None else scheduler.past_state(identity)
        return None if identity is None or state is None else Entry(identity, state)


def _slurm(job: Job) -> SlurmJob:
    assert isinstance(job, SlurmJob)
    return job


def _write_claim(job: SlurmJob) -> None:
    replace_file(job.run.path / CLAIM, json.dumps(job.claim))


def _parts(proposals: Sequence[Proposal]) -> Iterator[Sequence[Proposal]]:
    for start in range(0, len(proposals), LARGEST_ARRAY):
        yield proposals[start : start + LARGEST_ARRAY]


def _word(name: str) -> str:
    """A name that needs no quotes anywhere, short enough for a column."""
    return re.sub(r"[^-\w.]", "_", name)[:40]
