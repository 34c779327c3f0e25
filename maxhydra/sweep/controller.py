"""The loop of a sweep: keep every worker busy, read what jobs write, end what does badly, tell what came of it."""

import math
import time
from collections.abc import Callable

from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import Job, JobBackend, Proposal
from maxhydra.sweep.plan import SweepPlan
from maxhydra.sweep.trials import Proposals, TrialStatus

# Seconds between two looks at the jobs: a free worker has its next job within this.
LOOK_EVERY = 0.2


class Controller:
    """Runs the jobs of a plan. Nothing that it knows is lost with it."""

    def __init__(self, plan: SweepPlan, proposals: Proposals, jobs: JobBackend, say: Callable[[str], None]):
        self._plan, self._proposals, self._jobs, self._say = plan, proposals, jobs, say
        self._waiting: list[Proposal] = []
        self._running: list[Job] = []
        self._pruned: set[int] = set()
        self._reported: dict[int, int] = {}

    def run(self) -> str:
        """Until all jobs are over; why not all were started, if so."""
        self._adopt()
        try:
            while not self._plan.is_cancelled and (self._fill() or self._running):
                self._look()
                time.sleep(LOOK_EVERY)
        except KeyboardInterrupt:
            self._say(f"{self._jobs.leave(self._running)}; {self._way_on}")
            raise
        return self._ending()

    def submit(self) -> None:
        """Start what is left, and do not wait for it."""
        self._adopt()
        self._fill()
        for job in self._running:
            self._say(f"job {job.proposal.number}: {self._jobs.state(job) or 'started'}")

    @property
    def _way_on(self) -> str:
        return f"to go on: maxhydra sweep resume {self._plan.folder.name}"

    @property
    def _may_start(self) -> bool:
        """A search whose jobs fail is not worth going on with. Jobs that were all asked for have each their turn."""
        return not self._plan.space or self._proposals.counts()[TrialStatus.failed] <= self._plan.settings.max_failures

    def _ending(self) -> str:
        """What is not as it should be now that all is over."""
        if self._plan.is_cancelled:
            return f"cancelled; {self._way_on}"
        allowed, failed = self._plan.settings.max_failures, self._proposals.counts()[TrialStatus.failed]
        if self._plan.space and not self._may_start:
            return f"{failed} jobs failed, over max_failures={allowed}; {self._way_on} --max-failures {2 * failed}"
        if self._plan.space:
            return ""
        # Of jobs that were all asked for, one that is missing is one too many.
        return f"{failed} jobs failed; {self._way_on}" if failed else ""

    def _adopt(self) -> None:
        """Find what is under way already."""
        for proposal in self._proposals.unfinished():
            if (found := self._jobs.find(proposal)) is not None:
                self._say(f"job {proposal.number}: found running")
                self._running.append(found)
            elif not self._settled(proposal):
                self._waiting.append(proposal)

    def _fill(self) -> bool:
        """Start jobs while workers are free, all of them at once; whether any may follow."""
        settings, chosen = self._plan.settings, list[Proposal]()
        may_follow = True
        while may_follow and len(self._running) + len(chosen) < settings.workers:
            proposal = self._next() if self._may_start else None
            may_follow = proposal is not None
            if proposal is not None and self._prepared(proposal):
                chosen.append(proposal)
        self._running += self._jobs.start(chosen) if chosen else []
        for proposal in chosen:
            tried = " ".join(proposal.overrides) if self._plan.space else proposal.folder
            self._say(f"job {proposal.number}: {tried}")
        return may_follow

    def _next(self) -> Proposal | None:
        return self._waiting.pop(0) if self._waiting else self._proposals.next()

    def _prepared(self, proposal: Proposal) -> bool:
        """Whether the job can be started. Of a search, a combination that cannot work is a result as well."""
        try:
            self._jobs.prepare(proposal)
        except ConfigError as error:
            if not self._plan.space:
                raise
            self._say(f"job {proposal.number}: failed, {error.problems[0]}")
            self._proposals.tell(proposal, TrialStatus.failed, ())
            return False
        return True

    def _settled(self, proposal: Proposal) -> bool:
        """Whether a job that an earlier controller proposed came to its end since, which is told now.

        Not of jobs that were listed: those that failed are tried again, since whoever goes on has changed something.
        """
        job = self._jobs.past(proposal) if self._plan.space else None
        if job is None or not job.run.exists() or job.status() not in ("finished", "failed"):
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
                self._jobs.end([job])
                return

    def _close(self, job: Job) -> None:
        """A job is over: tell how it ended, or start it again where it was interrupted."""
        status, number = job.status(), job.proposal.number
        interrupted = status in ("preempted", "lost", "running") and number not in self._pruned
        if self._plan.is_cancelled and status != "finished":
            return
        if interrupted and job.restarts < self._plan.settings.max_restarts and self._jobs.may_restart(job):
            self._say(f"job {number}: {status}, goes on from its last checkpoint")
            (again,) = self._jobs.start([job.proposal])
            again.restarts = job.restarts + 1
            self._running.append(again)
            return
        self._tell(job)

    def _tell(self, job: Job) -> None:
        number, status = job.proposal.number, job.status()
        if number in self._pruned and status != "finished":
            self._proposals.tell(job.proposal, TrialStatus.pruned, ())
            return
        values = {name: value for name in self._plan.objectives if (value := job.last(name)) is not None}
        wrong = [f"logged no {name}" for name in self._plan.objectives if name not in values]
        wrong += [f"{name} is nan" for name, value in values.items() if math.isnan(value)]
        if status == "finished" and not wrong:
            shown = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._say(f"job {number}: {shown or 'finished'}")
            self._proposals.tell(job.proposal, TrialStatus.finished, list(values.values()))
            return
        why = ", ".join(wrong) if status == "finished" else job.reason()
        place = self._jobs.state(job)
        self._say(f"job {number}: failed, {why}{place and f' ({place})'}; see {job.run.path}")
        self._proposals.tell(job.proposal, TrialStatus.failed, ())
