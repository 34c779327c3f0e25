"""Beginning a sweep, and going on with one."""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import RunDirectory
from maxhydra.sweep.controller import Controller, Verdict
from maxhydra.sweep.jobs import LocalJobs
from maxhydra.sweep.plan import FILE, Plan, read_plan, write_plan
from maxhydra.sweep.proposals import Fate, ListedProposals, Proposal, Proposals
from maxhydra.sweep.search import SearchProposals

LOCK = ".sweep.lock"


def begin(plan: Plan, say: Callable[[str], None]) -> Verdict:
    """A new sweep, or the same one again, which goes on."""
    if (plan.folder / FILE).exists() and read_plan(plan.folder) != plan:
        hint = f"choose another run.name, or go on with that one: maxhydra sweep resume {plan.folder.name}"
        raise ConfigError(Problem("run.name", "is a sweep over something else", value=plan.folder.name, hint=hint))
    SearchProposals.check(plan)
    write_plan(plan)
    return go_on(plan, say)


def go_on(plan: Plan, say: Callable[[str], None]) -> Verdict:
    """Run what is left of a sweep. One process at a time."""
    with _alone(plan):
        proposals: Proposals = SearchProposals(plan) if plan.space else listed(plan)
        verdict = Controller(plan, proposals, LocalJobs(plan), say).run()
        say(proposals.summary())
    return verdict


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
    handle = os.open(plan.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        reason = "is being run by another process"
        raise ConfigError(Problem("sweep", reason, value=plan.folder.name, hint="wait for it, or end it")) from None
    else:
        yield
    finally:
        os.close(handle)


def status(plan: Plan) -> Iterator[str]:
    """A line for each job that was started, and what came of all."""
    for path in sorted(plan.folder.glob("*/run.json"), key=lambda path: int(path.parent.name.partition("_")[0])):
        facts = RunDirectory(path.parent, writes=False).read()
        value = (facts.get("objective") or {}).get("value")
        shown = "" if value is None else f"  {facts['objective']['name']} {value:.4g}"
        yield f"{path.parent.name}: {facts['status']}{shown}"
    proposals: Proposals = SearchProposals(plan) if plan.space else listed(plan)
    yield proposals.summary()
