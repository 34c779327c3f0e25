"""Beginning a sweep, and going on with one."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import RunDirectory
from maxhydra.record.lock import take_lock
from maxhydra.sweep.controller import Controller
from maxhydra.sweep.jobs import LocalJobs
from maxhydra.sweep.plan import FILE, Plan, read_plan, write_plan
from maxhydra.sweep.proposals import Fate, ListedProposals, Proposal, Proposals
from maxhydra.sweep.search import SearchProposals

LOCK = ".sweep.lock"


def begin(plan: Plan, say: Callable[[str], None]) -> str:
    """A new sweep, or the same one again, which goes on; why it ended early, if it did."""
    if (plan.folder / FILE).exists() and read_plan(plan.folder) != plan:
        hint = f"choose another run.name, or go on with that one: maxhydra sweep resume {plan.folder.name}"
        raise ConfigError(Problem("run.name", "is a sweep over something else", value=plan.folder.name, hint=hint))
    SearchProposals.check(plan)
    write_plan(plan)
    return go_on(plan, say)


def go_on(plan: Plan, say: Callable[[str], None]) -> str:
    """Run what is left of a sweep; why it ended early, if it did. One process at a time."""
    with _alone(plan):
        proposals = _proposals(plan)
        reason = Controller(plan, proposals, LocalJobs(plan), say).run()
        say(proposals.summary())
    return reason


def _proposals(plan: Plan) -> Proposals:
    return SearchProposals(plan) if plan.space else listed(plan)


def listed(plan: Plan) -> ListedProposals:
    """The jobs of a plain sweep; those that failed are tried again, since whoever goes on has changed something."""
    jobs = [
        Proposal(number, folder, overrides)
        for number, (folder, overrides) in enumerate(zip(plan.folders, plan.listed, strict=True))
    ]
    runs = {job.number: RunDirectory(plan.folder / job.folder, writes=False) for job in jobs}
    done = {number: Fate.finished for number, run in runs.items() if _is_finished(run)}
    return ListedProposals(jobs, done)


def _is_finished(run: RunDirectory) -> bool:
    return run.exists() and run.read()["status"] == "finished"


@contextmanager
def _alone(plan: Plan) -> Iterator[None]:
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


def status(plan: Plan) -> Iterator[str]:
    """A line for each job that was started, and what came of all."""
    for path in sorted(plan.folder.glob("*/run.json"), key=lambda path: int(path.parent.name.partition("_")[0])):
        facts = RunDirectory(path.parent, writes=False).read()
        value = (facts.get("objective") or {}).get("value")
        shown = "" if value is None else f"  {facts['objective']['name']} {value:.4g}"
        yield f"{path.parent.name}: {facts['status']}{shown}"
    yield _proposals(plan).summary()
