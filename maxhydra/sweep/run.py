"""Start, resume, cancel, and report the status of a sweep."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.migrations import migrate_config
from maxhydra.launch.base import JobBackend
from maxhydra.launch.registry import make_backend
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import acquire_lock, from_number, replace_file
from maxhydra.sweep.controller import Controller, ListedTrials, TrialSource, format_counts
from maxhydra.sweep.plan import CANCELLED, FILE, SweepPlan, read_plan, write_plan
from maxhydra.sweep.search import SearchTrials
from maxhydra.sweep.table import LiveTable

LOCK = ".sweep.lock"


def start_sweep(plan: SweepPlan, say: Callable[[str], None]) -> str:
    """Start a sweep, or resume it if it is the same; returns why it ended early, or an empty string."""
    # A sweep may be resumed with another launcher.
    stored = replace(read_plan(plan.folder), launcher=plan.launcher) if (plan.folder / FILE).exists() else plan
    # The stored study uses the keys and folders of its first start, which may have been renamed since.
    if replace(stored, space=migrate_config(stored.space)) == plan:
        plan = stored
    else:
        hint = f"choose another run.name, or resume the existing sweep: maxhydra sweep resume {plan.argument}"
        raise ConfigError(
            Problem("run.name", "is an existing sweep with different settings", value=plan.folder.name, hint=hint)
        )
    SearchTrials.check(plan)
    write_plan(plan)
    return resume_sweep(plan, say)


def resume_sweep(plan: SweepPlan, say: Callable[[str], None], *, detach: bool = False) -> str:
    """Run the remaining jobs of a sweep; returns why it ended early, or an empty string. Holds the sweep's lock.

    With `detach`, submit the jobs and return. Unsupported for searches, which need results.
    """
    with _sweep_lock(plan):
        (plan.folder / CANCELLED).unlink(missing_ok=True)
        trials = _trials(plan)
        table = LiveTable(say) if sys.stdout.isatty() and not detach else None
        controller = Controller(plan, trials, _backend(plan), say, table=table)
        if detach:
            controller.submit()
            say(f"monitor: maxhydra sweep resume {plan.argument}; stop: maxhydra sweep cancel {plan.argument}")
            return ""
        reason = controller.run()
        say("\n".join([format_counts(trials.counts()), *trials.highlights()]))
    return reason


def cancel(plan: SweepPlan, say: Callable[[str], None]) -> None:
    """Ask running jobs to save and exit, and the sweep's controller to start no more."""
    replace_file(plan.folder / CANCELLED, "")
    backend = _backend(plan)
    active = [job for trial in _trials(plan).unfinished() if (job := backend.find_active(trial)) is not None]
    backend.stop(active)
    say(f"{len(active)} jobs were asked to stop; resume with: maxhydra sweep resume {plan.argument}")


def _backend(plan: SweepPlan) -> JobBackend:
    return make_backend(plan.launcher, plan.context)


def _trials(plan: SweepPlan) -> TrialSource:
    return SearchTrials(plan) if plan.space else ListedTrials(plan)


@contextmanager
def _sweep_lock(plan: SweepPlan) -> Iterator[None]:
    """Hold the sweep's lock: two controllers would each start the jobs that the other has proposed."""
    try:
        lock = acquire_lock(plan.folder / LOCK)
    except BlockingIOError:
        reason = "is being run by another process"
        raise ConfigError(Problem("sweep", reason, value=plan.folder.name, hint="wait for it, or stop it")) from None
    try:
        yield
    finally:
        if lock is not None:
            os.close(lock)


def status(plan: SweepPlan) -> Iterator[str]:
    """Yield one line per started job, with its run status and scheduler state, and a summary."""
    backend, trials = _backend(plan), _trials(plan)
    active = {
        job.trial.folder: job for trial in trials.unfinished() if (job := backend.find_started(trial)) is not None
    }
    # A run that was started into the folder by hand is not a job, whose folder begins with its number.
    runs = {name for path in plan.folder.glob("*/run.json") if _number(name := path.parent.name) is not None}
    for name in sorted(runs | set(active), key=lambda name: _number(name) or 0):
        state = backend.state(active[name]) if name in active else ""
        run_status = _run_status(RunDirectory(plan.folder / name, writes=False)) if name in runs else "not started"
        yield f"{name}: {run_status}{state and f'  {state}'}"
    waiting = sum(trial.folder not in runs | set(active) for trial in plan.trials)
    counts = [format_counts(trials.counts()), f"{waiting} not started" if waiting else ""]
    yield ", ".join(filter(None, counts)) or f"no job has ended; resume with: maxhydra sweep resume {plan.argument}"
    yield from trials.highlights()


def _number(folder: str) -> int | None:
    """Number of the job in a folder such as 3_learning_rate=0.01; None if the name has none."""
    number = folder.partition("_")[0]
    return int(number) if number.isdecimal() else None


def _run_status(run: RunDirectory) -> str:
    """A run's status, and its objective if it has one."""
    facts = run.read()
    objective = facts.get("objective") or {}
    value = from_number(objective.get("value"))
    return str(facts["status"]) if value is None else f"{facts['status']}  {objective['name']} {value:.4g}"
