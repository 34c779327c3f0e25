"""The loop of a sweep: keep every worker busy, read what jobs write, end what does badly, tell what came of it."""

import logging
import time
from collections.abc import Callable

from maxhydra.record import scan_metrics, series
from maxhydra.sweep.jobs import Job, Jobs
from maxhydra.sweep.plan import Plan
from maxhydra.sweep.proposals import Fate, Proposal, Proposals

log = logging.getLogger("maxhydra")
# Seconds between two looks at the jobs: a free worker has its next job within this.
LOOK_EVERY = 0.2


class Controller:
    """Runs the jobs of a plan. Nothing that it knows is lost with it."""

    def __init__(self, plan: Plan, proposals: Proposals, jobs: Jobs, say: Callable[[str], None]):
        self._plan, self._proposals, self._jobs, self._say = plan, proposals, jobs, say
        self._running: list[Job] = []
        self._pruned: set[int] = set()
        self._reported: dict[int, int] = {}

    def run(self) -> str:
        """Until all jobs are over; why not all were started, if so.

        Interrupted, it asks those under way to save and end, and leaves them unfinished.
        """
        waiting = self._proposals.unfinished()
        for proposal in list(waiting):
            if (found := self._jobs.find(proposal)) is not None:
                self._say(f"job {proposal.number}: found running")
                waiting.remove(proposal)
                self._running.append(found)
        try:
            while self._fill(waiting) or self._running:
                self._look()
                time.sleep(LOOK_EVERY)
        except KeyboardInterrupt:
            for job in self._running:
                self._jobs.end(job)
            raise
        allowed, failed = self._plan.settings.max_failures, self._proposals.counts()[Fate.failed]
        return f"{failed} jobs failed, over max_failures={allowed}" if failed > allowed else ""

    def _fill(self, waiting: list[Proposal]) -> bool:
        """Start jobs while workers are free; whether any may follow."""
        while len(self._running) < self._plan.settings.workers:
            if self._proposals.counts()[Fate.failed] > self._plan.settings.max_failures:
                return False
            proposal = waiting.pop(0) if waiting else self._proposals.next()
            if proposal is None:
                return False
            if self._settled(proposal):
                continue
            self._say(f"job {proposal.number}: {' '.join(proposal.overrides) or 'as it is'}")
            self._running.append(self._jobs.start(proposal))
        return True

    def _settled(self, proposal: Proposal) -> bool:
        """Whether a job that an earlier controller started came to its end since, which is told now."""
        job = self._jobs.past(proposal)
        if job is None or _status(job) not in ("finished", "failed"):
            return False
        self._tell(job)
        return True

    def _look(self) -> None:
        """One look at every job."""
        for job in list(self._running):
            ended = not self._jobs.is_running(job)
            self._report(job)
            if ended:
                self._running.remove(job)
                self._close(job)

    def _report(self, job: Job) -> None:
        """Hand on what the objective was at each evaluation since the last look; end the job where that is asked."""
        number = job.proposal.number
        if len(self._plan.objectives) != 1 or number in self._pruned:
            return
        (name,) = self._plan.objectives
        for step, value in job.news(name):
            if step <= self._reported.get(number, -1):
                continue
            self._reported[number] = step
            if self._proposals.report(job.proposal, step, value) and self._jobs.is_running(job):
                self._say(f"job {number}: ended at step {step}, {name} {value:.4g}")
                self._pruned.add(number)
                self._jobs.end(job)
                return

    def _close(self, job: Job) -> None:
        """A job's process is gone: tell how it ended, or start it again where it was interrupted."""
        status = _status(job)
        interrupted = status in ("preempted", "lost", "running") and job.proposal.number not in self._pruned
        if interrupted and job.restarts < self._plan.settings.max_restarts:
            self._say(f"job {job.proposal.number}: {status}, goes on from its last checkpoint")
            again = self._jobs.start(job.proposal)
            again.restarts = job.restarts + 1
            self._running.append(again)
            return
        self._tell(job)

    def _tell(self, job: Job) -> None:
        number, status = job.proposal.number, _status(job)
        if number in self._pruned and status != "finished":
            self._proposals.tell(job.proposal, Fate.pruned, ())
            return
        values = [_last(job, name) for name in self._plan.objectives]
        missing = [name for name, value in zip(self._plan.objectives, values, strict=True) if value is None]
        if status == "finished" and not missing:
            told = [value for value in values if value is not None]
            shown = ", ".join(f"{name} {value:.4g}" for name, value in zip(self._plan.objectives, told, strict=True))
            self._say(f"job {number}: {shown or 'finished'}")
            self._proposals.tell(job.proposal, Fate.finished, told)
            return
        why = f"logged no {', '.join(missing)}" if status == "finished" else _reason(job)
        self._say(f"job {number}: failed, {why}; see {job.run.path}")
        self._proposals.tell(job.proposal, Fate.failed, ())


def _status(job: Job) -> str:
    """What the run says of itself; `failed` where it never came to say anything."""
    return str(job.run.read()["status"]) if job.run.exists() else "failed"


def _reason(job: Job) -> str:
    return str(job.run.read().get("reason") or "it does not say why") if job.run.exists() else "it did not begin"


def _last(job: Job, name: str) -> float | None:
    """The last value that a run logged of a metric."""
    values = series(scan_metrics(job.run.metrics_path).rows, name)[1]
    return values[-1] if values else None
