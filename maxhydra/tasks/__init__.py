"""Tasks by name: `task.name` is a module here with a function `run(job)`.

Each module says whether it needs the devices of the hardware option (`NEEDS_DEVICES`; one that only plans for them runs
anywhere) and whether it keeps a run (`KEEPS_RUN`; one that does not only prints). For a run that is kept, `run` opens
its folder, keeps run.json true whatever happens, and says how it ended.
"""

import contextlib
import dataclasses
import importlib
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from jax.experimental import multihost_utils

from maxhydra import runtime
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.serialize import to_yaml
from maxhydra.record import RunDirectory, RunInUseError, logging_to, scrub_argv
from maxhydra.runtime import Machine


@dataclasses.dataclass(frozen=True)
class Job:
    """A valid config on a started machine, and the run's folder; a task that only prints leaves it untouched."""

    config: Config
    choices: dict[str, str]
    machine: Machine
    run: RunDirectory
    overrides: tuple[str, ...] = ()
    """What the config was composed from besides the choices; secrets may be among them."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a task ended: a run status, why, its metrics, and facts worth keeping in run.json."""

    status: str
    reason: str
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """What the command reports: the run's folder (None where none is kept), how it ended, the objective's value."""

    path: Path | None
    status: str
    reason: str
    objective: float | None
    writes: bool
    """Whether this is the process that writes the folder."""


def run(
    config: Config, *, choices: dict[str, str], overrides: list[str], path: Path | None, config_dir: str | None = None
) -> Result:
    """Start the machine and run the task. `path` is the run's folder where a launcher has fixed it already.

    `overrides` and `config_dir` are kept with the run: with them it can be started again.
    """
    task = importlib.import_module(f"maxhydra.tasks.{config.task.name}")
    if path is None and task.KEEPS_RUN and config.run.name is not None:
        _check_place(Path(config.run.outputs), config.run.name)
    machine = runtime.start(config.hardware) if task.NEEDS_DEVICES else runtime.start_on_host()
    path = path or Path(config.run.outputs) / (config.run.name or _default_name(config, choices))
    is_main = machine.process_index == 0
    folder = RunDirectory(path.absolute(), writes=is_main and task.KEEPS_RUN)
    job = Job(config, choices, machine, folder, tuple(overrides))
    if not task.KEEPS_RUN:
        with logging_to(None, console=False):
            return _result(job, task.run(job), path=None)
    with logging_to(job.run.log_path if is_main else None, console=is_main):
        try:
            return _recorded(job, config_dir, task.run)
        except RunInUseError as error:
            hint = "wait for it, or choose another run.name"
            raise ConfigError(Problem("run.name", str(error), value=config.run.name, hint=hint)) from None


def _check_place(outputs: Path, name: str) -> None:
    """A new run lies neither in another's folder nor around one: whoever looks for runs would not see the inner one,
    and whoever takes the outer one away would take both."""
    folder = outputs / name
    if RunDirectory(folder).exists():
        return
    above = [outputs / part for part in Path(name).parents][:-1]
    if outer := next((path for path in above if RunDirectory(path).exists()), None):
        raise ConfigError(Problem("run.name", f"lies in the folder of a run, {outer}", name, hint="choose another"))
    if inner := next(folder.glob("**/run.json"), None):
        reason = f"is a folder of other runs, such as {inner.parent}"
        raise ConfigError(Problem("run.name", reason, name, hint=f"choose another, or {name}/NAME"))


def _recorded(job: Job, config_dir: str | None, task: Callable[[Job], Outcome]) -> Result:
    """Run the task within a session of its run, and write down how it ended."""
    machine = job.machine
    facts = {
        "task": job.config.task.name,
        "choices": job.choices,
        "overrides": scrub_argv(list(job.overrides)),
        **({} if config_dir is None else {"config_dir": config_dir}),
        "tags": job.config.run.tags,
        "notes": job.config.run.notes,
        "hardware": machine.name,
        "devices": f"{machine.devices} x {machine.device_kind}",
        "processes": machine.process_count,
        "xla_flags": machine.xla_flags,
        "seen": machine.notes,
    }
    with job.run.session(to_yaml(job.config), facts):
        try:
            outcome = task(job)
        except ConfigError as error:
            # A mistake that only the devices or the data could show: a new run leaves no folder behind.
            job.run.withdraw("; ".join(str(problem) for problem in error.problems))
            raise
        result = _result(job, outcome, path=job.run.path)
        objective = {"name": job.config.objective, "value": result.objective}
        job.run.finish(outcome.status, outcome.reason, objective=objective, metrics=outcome.metrics, **outcome.facts)
    return result


def _result(job: Job, outcome: Outcome, *, path: Path | None) -> Result:
    return Result(
        path=path,
        status=outcome.status,
        reason=outcome.reason,
        objective=outcome.metrics.get(job.config.objective),
        writes=job.machine.process_index == 0,
    )


@contextlib.contextmanager
def atomic_output_dir(path: Path) -> Iterator[Path]:
    """The folder task.output to write, which takes its name once it is complete."""
    if path.exists():
        hint = "name another folder, or move it away"
        raise ConfigError(Problem("task.output", "is there already", value=path, hint=hint))
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _default_name(config: Config, choices: dict[str, str]) -> str:
    """Task, model and time; the first process's time, so that all processes agree on the folder."""
    seconds = int(multihost_utils.broadcast_one_to_all(np.int64(time.time())))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return f"{config.task.name}-{choices.get('model', 'run')}-{stamp}"
