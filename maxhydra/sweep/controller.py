"""The control loop of a sweep: keep workers busy, read metrics, prune bad trials, record results.

A source of trials proposes the next job, and records the results of jobs that ended.
"""

import math
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Protocol

from maxhydra.config.errors import ConfigError
from maxhydra.config.schema.metrics import is_maximized
from maxhydra.launch.base import Job, JobBackend, Trial
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import from_number
from maxhydra.sweep.extension import suggest_extension
from maxhydra.sweep.plan import SweepPlan
from maxhydra.sweep.table import LiveTable, Snapshot


class TrialStatus(Enum):
    """How a trial ended."""

    finished = "finished"
    failed = "failed"
    pruned = "pruned"


class TrialSource(Protocol):
    """Proposes trials and records their results. All of its state survives the process."""

    def unfinished(self) -> list[Trial]:
        """Trials that were proposed before and have no recorded result."""
        ...

    def next_trial(self) -> Trial | None:
        """Propose a new trial; None after the last one."""
        ...

    def report(self, trial: Trial, step: int, value: float) -> bool:
        """Report the objective at a step; returns True if the trial should be pruned."""
        ...

    def record_result(self, trial: Trial, status: TrialStatus, values: Sequence[float]) -> None:
        """Record how a trial ended, with its objective values."""
        ...

    def counts(self) -> Mapping[TrialStatus, int]:
        """Number of ended trials by status."""
        ...

    def num_remaining(self) -> int:
        """Number of trials that `next_trial` will still propose."""
        ...

    def best(self) -> str:
        """The best finished job with its result; empty if no job has finished."""
        ...

    def highlights(self) -> list[str]:
        """Lines about the best jobs and how to continue; empty if no job has finished."""
        ...


class ListedTrials:
    """The fixed list of jobs of a grid sweep. Their results are stored in their run folders."""

    def __init__(self, plan: SweepPlan):
        """Jobs that failed before count as unfinished, so they run again."""
        self._plan = plan
        self._results: dict[int, tuple[str, float]] = {}
        """Objective and its value of each finished job that has one."""
        done = [trial.number for trial in plan.trials if self._read_result(trial) == "finished"]
        self._unfinished = [trial for trial in plan.trials if trial.number not in done]
        self._statuses = dict.fromkeys(done, TrialStatus.finished)

    def _read_result(self, trial: Trial) -> str | None:
        """Status of a trial's run; None without a run. Keeps the objective of a finished one."""
        run = RunDirectory(self._plan.folder / trial.folder, writes=False)
        facts = run.read() if run.exists() else {}
        objective = facts.get("objective") or {}
        value = from_number(objective.get("value"))
        if facts.get("status") == "finished" and value is not None and not math.isnan(value):
            self._results[trial.number] = (objective["name"], value)
        return facts.get("status")

    def unfinished(self) -> list[Trial]:
        return self._unfinished

    def next_trial(self) -> Trial | None:
        return None

    def report(self, trial: Trial, step: int, value: float) -> bool:
        return False

    def record_result(self, trial: Trial, status: TrialStatus, values: Sequence[float]) -> None:
        self._statuses[trial.number] = status
        self._read_result(trial)

    def num_remaining(self) -> int:
        return 0

    def best(self) -> str:
        best = self._best()
        if best is None:
            return ""
        name, value = self._results[best.number]
        return f"job {best.folder}, {name} {value:.4g}"

    def _best(self) -> Trial | None:
        """The finished job with the best objective; None if there is none, or jobs have different objectives."""
        names = {name for name, _ in self._results.values()}
        if len(names) != 1:
            return None
        choose = max if is_maximized(names.pop()) else min
        return self._plan.trials[choose(self._results, key=lambda number: self._results[number][1])]

    def counts(self) -> Mapping[TrialStatus, int]:
        return {status: list(self._statuses.values()).count(status) for status in TrialStatus}

    def highlights(self) -> list[str]:
        """The best job with the command that reruns it, and the command that adds values to the grid."""
        best = self._best()
        if best is None or len(self._plan.trials) == 1:
            return []
        command = shlex.join(["maxhydra", *self._plan.context.flags, *best.overrides])
        more = f"maxhydra sweep extend {self._plan.argument} {suggest_extension(self._plan, best)}"
        return [f"best: {self.best()}", f"      {command}", f"more: {more}"]


def format_counts(counts: Mapping[TrialStatus, int]) -> str:
    return ", ".join(f"{count} {status.value}" for status, count in counts.items() if count)


# Seconds between polls of the jobs, which bounds the idle time of a free worker.
POLL_SECONDS = 0.2


class Controller:
    """Runs the jobs of a plan. It holds no state that would be lost if it were killed."""

    def __init__(
        self,
        plan: SweepPlan,
        trials: TrialSource,
        backend: JobBackend,
        say: Callable[[str], None],
        *,
        table: LiveTable | None = None,
    ):
        """`table` shows the progress on a terminal, with the lines of `say` above it."""
        self._plan, self._trials, self._backend = plan, trials, backend
        self._table, self._say = table, say if table is None else table.say
        self._waiting: list[Trial] = []
        self._running: list[Job] = []
        self._pruned: dict[int, str] = {}
        """Numbers of the trials that were asked to stop, with the reason."""
        self._last_reported_step: dict[int, int] = {}

    def run(self) -> str:
        """Run until all jobs have ended; returns why the sweep is incomplete, or an empty string."""
        self._adopt()
        try:
            while not self._plan.is_cancelled and (self._fill_workers() or self._running):
                self._poll()
                self._draw()
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            self._say(f"{self._backend.on_interrupt(self._running)}; {self._resume_hint}")
            raise
        finally:
            if self._table is not None:
                self._table.clear()
        return self._problem()

    def _draw(self) -> None:
        if self._table is None or not self._table.is_due:
            return
        counts = {status.value: count for status, count in self._trials.counts().items()}
        counts |= {"running": len(self._running), "waiting": len(self._waiting) + self._trials.num_remaining()}
        running = [(job, self._backend.state(job)) for job in self._running]
        self._table.draw(Snapshot(self._plan.folder.name, counts, running, self._trials.best()))

    def submit(self) -> None:
        """Start the remaining jobs without waiting for them."""
        self._adopt()
        self._fill_workers()
        for job in self._running:
            self._say(f"job {job.trial.number}: {self._backend.state(job) or 'started'}")

    @property
    def _resume_hint(self) -> str:
        return f"resume with: maxhydra sweep resume {self._plan.argument}"

    @property
    def _may_start(self) -> bool:
        """False for a search with too many failed jobs. A grid sweep always runs every job."""
        return not self._plan.space or self._trials.counts()[TrialStatus.failed] <= self._plan.settings.max_failures

    def _problem(self) -> str:
        """Why the sweep is incomplete; empty if it is complete."""
        if self._plan.is_cancelled:
            return f"cancelled; {self._resume_hint}"
        allowed, failed = self._plan.settings.max_failures, self._trials.counts()[TrialStatus.failed]
        if self._plan.space and not self._may_start:
            return f"{failed} jobs failed, over max_failures={allowed}; {self._resume_hint} --max-failures {2 * failed}"
        if self._plan.space:
            return ""
        # A grid sweep is complete only if every job succeeded.
        return f"{failed} jobs failed; {self._resume_hint}" if failed else ""

    def _adopt(self) -> None:
        """Take over jobs that an earlier controller started."""
        for trial in self._trials.unfinished():
            if (job := self._backend.find_active(trial)) is not None:
                self._say(f"job {trial.number}: found running")
                self._running.append(job)
            elif not self._record_if_ended(trial):
                self._waiting.append(trial)

    def _fill_workers(self) -> bool:
        """Start jobs for all free workers in one batch; returns whether more may follow."""
        batch, may_follow = list[Trial](), True
        limit = min(self._plan.settings.workers, self._backend.max_jobs or math.inf)
        while may_follow and len(self._running) + len(batch) < limit:
            trial = self._next_trial() if self._may_start else None
            may_follow = trial is not None
            if trial is not None and self._prepare(trial):
                batch.append(trial)
        self._running += self._backend.start(batch) if batch else []
        for trial in batch:
            label = " ".join(trial.overrides) if self._plan.space else trial.folder
            self._say(f"job {trial.number}: {label}")
        return may_follow

    def _next_trial(self) -> Trial | None:
        return self._waiting.pop(0) if self._waiting else self._trials.next_trial()

    def _prepare(self, trial: Trial) -> bool:
        """Prepare a job; False if its config is invalid, which a search records as a failed trial."""
        try:
            self._backend.prepare(trial)
        except ConfigError as error:
            if not self._plan.space:
                raise
            self._say(f"job {trial.number}: failed, {error.problems[0]}")
            self._trials.record_result(trial, TrialStatus.failed, ())
            return False
        return True

    def _record_if_ended(self, trial: Trial) -> bool:
        """Record the result of a job that ended while no controller was running; False if there is none.

        Failed jobs of a grid sweep are not recorded but run again, since the user has presumably fixed something.
        """
        job = self._backend.find_started(trial) if self._plan.space else None
        if job is None or not job.run.exists() or job.status() not in ("finished", "failed", "pruned"):
            return False
        self._record(job)
        return True

    def _poll(self) -> None:
        """Check every running job once."""
        for job in list(self._running):
            ended = not self._backend.is_running(job)
            self._report(job)
            if ended:
                self._running.remove(job)
                self._close(job)

    def _report(self, job: Job) -> None:
        """Report new objective values to the pruner, and stop the job if it is to be pruned."""
        number = job.trial.number
        if len(self._plan.objectives) != 1 or number in self._pruned:
            return
        (name,) = self._plan.objectives
        for step, value in job.new_values(name):
            if step <= self._last_reported_step.get(number, -1):
                continue
            self._last_reported_step[number] = step
            if self._trials.report(job.trial, step, value) and self._backend.is_running(job):
                pruner = self._plan.settings.pruner
                self._pruned[number] = f"pruned by {pruner} at step {step}, {name} {value:.4g}"
                self._say(f"job {number}: {self._pruned[number]}")
                self._backend.stop([job])
                return

    def _close(self, job: Job) -> None:
        """Handle a job that has ended: restart it if it was interrupted, else record its result."""
        status, number = job.status(), job.trial.number
        interrupted = status in ("preempted", "lost", "running") and number not in self._pruned
        if self._plan.is_cancelled and status != "finished":
            return
        if interrupted and job.restarts < self._plan.settings.max_restarts and self._backend.may_restart(job):
            self._say(f"job {number}: {status}, resumes from its last checkpoint")
            (restarted,) = self._backend.start([job.trial])
            restarted.restarts = job.restarts + 1
            self._running.append(restarted)
            return
        self._record(job)

    def _record(self, job: Job) -> None:
        number, status = job.trial.number, job.status()
        if status == "pruned" or (number in self._pruned and status != "finished"):
            if number in self._pruned and job.run.exists():
                RunDirectory(job.run.path).mark_pruned(self._pruned[number])
            self._trials.record_result(job.trial, TrialStatus.pruned, ())
            return
        values = {name: value for name in self._plan.objectives if (value := job.last_value(name)) is not None}
        problems = [f"did not log {name}" for name in self._plan.objectives if name not in values]
        problems += [f"{name} is nan" for name, value in values.items() if math.isnan(value)]
        if status == "finished" and not problems:
            scores = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self._say(f"job {number}: {scores or 'finished'}")
            self._trials.record_result(job.trial, TrialStatus.finished, list(values.values()))
            return
        reason = ", ".join(problems) if status == "finished" else job.reason()
        state = self._backend.state(job)
        self._say(f"job {number}: failed, {reason}{state and f' ({state})'}; see {job.run.path}")
        self._trials.record_result(job.trial, TrialStatus.failed, ())
