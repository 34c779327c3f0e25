"""Beginning a sweep, and going on with one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.migrations import migrate_config
from maxhydra.launch.base import JobBackend
from maxhydra.launch.registry import make_backend
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import from_number, replace_file
from maxhydra.record.lock import take_lock
from maxhydra.sweep.controller import Controller
from maxhydra.sweep.plan import CANCELLED, FILE, SweepPlan, read_plan, write_plan
from maxhydra.sweep.search import SearchProposals
from maxhydra.sweep.trials import ListedProposals, Proposals, TrialStatus

LOCK = ".sweep.lock"


def begin(plan: SweepPlan, say: Callable[[str], None]) -> str:
    """A new sweep, or the same one again, which goes on; why it ended early, if it did."""
    # The same sweep may go on at another place.
    stored = replace(read_plan(plan.folder), launcher=plan.launcher) if (plan.folder / FILE).exists() else plan
    # The study on disk has the keys and folders that the sweep began with, which may have been renamed since.
    if replace(stored, space=migrate_config(stored.space)) == plan:
        plan = stored
    else:
        hint = f"choose another run.name, or go on with that one: maxhydra sweep resume {plan.folder.name}"
        raise ConfigError(Problem("run.name", "is a sweep over something else", value=plan.folder.name, hint=hint))
    SearchProposals.check(plan)
    write_plan(plan)
    return resume_sweep(plan, say)


def resume_sweep(plan: SweepPlan, say: Callable[[str], None], *, detach: bool = False) -> str:
    """Run what is left of a sweep; why it ended early, if it did. One process at a time.

    With `detach`, only start it: not for a search, which has to wait for results.
    """
    with _alone(plan):
        (plan.folder / CANCELLED).unlink(missing_ok=True)
        proposals = _proposals(plan)
        controller = Controller(plan, proposals, _jobs(plan), say)
        if detach:
            controller.submit()
            say(f"to watch: maxhydra sweep resume {plan.folder.name}; to end: maxhydra sweep cancel {plan.folder.name}")
            return ""
        reason = controller.run()
        say(proposals.summary())
    return reason


def cancel(plan: SweepPlan, say: Callable[[str], None]) -> None:
    """Ask what is under way to save and end, and whoever runs the sweep to start no more."""
    replace_file(plan.folder / CANCELLED, "")
    jobs = _jobs(plan)
    under_way = [job for proposal in _proposals(plan).unfinished() if (job := jobs.find(proposal)) is not None]
    jobs.end(under_way)
    say(f"{len(under_way)} jobs were told to end; to go on: maxhydra sweep resume {plan.folder.name}")


def _jobs(plan: SweepPlan) -> JobBackend:
    return make_backend(plan.launcher, plan.shared)


def _proposals(plan: SweepPlan) -> Proposals:
    return SearchProposals(plan) if plan.space else listed(plan)


def listed(plan: SweepPlan) -> ListedProposals:
    """The jobs of a plain sweep, those that failed before too."""
    runs = {job.number: RunDirectory(plan.folder / job.folder, writes=False) for job in plan.proposals}
    done = {number: TrialStatus.finished for number, run in runs.items() if _is_finished(run)}
    return ListedProposals(plan.proposals, done)


def _is_finished(run: RunDirectory) -> bool:
    return run.exists() and run.read()["status"] == "finished"


@contextmanager
def _alone(plan: SweepPlan) -> Iterator[None]:
    """Two controllers would each start the job that the other has just proposed."""
    try:
        lock = take_lock(plan.folder / LOCK)
    except BlockingIOError:
        reason = "is being run by another process"
        raise ConfigError(Problem("sweep", reason, value=plan.folder.name, hint="wait for it, or end it")) from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def status(plan: SweepPlan) -> Iterator[str]:
    """A line for each job that was started, with what its place says of it, and what came of all."""
    jobs, proposals = _jobs(plan), _proposals(plan)
    started = {job.proposal.folder: job for each in proposals.unfinished() if (job := jobs.past(each)) is not None}
    began = {path.parent.name for path in plan.folder.glob("*/run.json")}
    for name in sorted(began | set(started), key=lambda name: int(name.partition("_")[0])):
        place = jobs.state(started[name]) if name in started else ""
        told = _told(RunDirectory(plan.folder / name, writes=False)) if name in began else "has not begun"
        yield f"{name}: {told}{place and f'  {place}'}"
    yield proposals.summary()


def _told(run: RunDirectory) -> str:
    """A run's status, and its objective where it has come to one."""
    facts = run.read()
    objective = facts.get("objective") or {}
    value = from_number(objective.get("value"))
    return str(facts["status"]) if value is None else f"{facts['status']}  {objective['name']} {value:.4g}"
