"""Runs a task, and records it in a run folder.

A task is a module of this package with a function `run(job) -> Outcome` and two constants: `NEEDS_DEVICES` (False for
tasks that only plan, which run on any host) and `KEEPS_RUN` (False for tasks that only print). For a task that keeps a
run, the runner opens the folder, keeps run.json up to date even if the task fails, and records how it ended. A task
with `TRAINS = True` resumes an existing run, whose config and inputs are compared first (_resume.py); one with
`COMPILES = True` compiles for other devices with the numerical settings of config.hardware.
"""

import contextlib
import dataclasses
import importlib
import logging
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from jax.experimental import multihost_utils

from maxhydra import runtime
from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.plug_ins import bind_options, is_plug_in, load_object
from maxhydra.config.schema.run import new_name_problem
from maxhydra.config.serialize import stored_secrets, stored_values, to_stored_yaml
from maxhydra.measure.record import OutOfMemoryError, explain_out_of_memory, require_memory, suggest_less_memory
from maxhydra.plan.estimate import with_remat_on
from maxhydra.record import RunDirectory, RunInUseError, logging_to, redact_argv
from maxhydra.record.atomic_io import NewerFormatError, from_number
from maxhydra.record.storage import StorageError
from maxhydra.runtime import Machine, alerts, peers, signals
from maxhydra.tasks._resume import Session, prepare_session
from maxhydra.tasks._storage import check_reachable, stored_run
from maxhydra.train.batches import resolve_epochs
from maxhydra.train.trackers import track_outcome

log = logging.getLogger("maxhydra")

# Tasks that measure training steps.
MEASURED = ("bench", "tune")
# Constants of a task that the module of a user's task leaves out.
USUAL = {"NEEDS_DEVICES": True, "KEEPS_RUN": True, "TRAINS": False, "COMPILES": False}
SECRET_WARNING = (
    "%s looks like a secret and is stored as ***; pass it by a variable, %s='${oc.env:NAME}', to resume without it"
)


@dataclasses.dataclass(frozen=True)
class Job:
    """A valid config, the initialized machine, and the run's folder, which a task that only prints does not use."""

    config: Config
    choices: dict[str, str]
    machine: Machine
    run: RunDirectory
    overrides: tuple[str, ...] = ()
    """Overrides that the config was composed from, in addition to the choices; they may contain secrets."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a task ended: run status, reason, metrics, and further facts for run.json."""

    status: str
    reason: str
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    facts: dict[str, object] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Result:
    """The result that the command reports: the run's folder (None if not kept), status, reason, objective."""

    path: Path | None
    status: str
    reason: str
    objective: float | None
    writes: bool
    """Whether this process is the one that writes the folder."""
    metrics: dict[str, float] = dataclasses.field(default_factory=dict)
    url: str | None = None
    """Where the folder was uploaded to; None if run.outputs is a local folder."""


def run(
    config: Config, *, choices: dict[str, str], overrides: list[str], path: Path | None, config_dir: str | None = None
) -> Result:
    """Initialize the machine and run the task. `path` is the run's folder if a launcher has already chosen it.

    `overrides` and `config_dir` are recorded with the run, so that it can be started again.
    """
    task = _find_task(config)
    if path is None and task.KEEPS_RUN and config.run.name is not None:
        _check_name(config.run.folder(), config.run.name)
    if path is None and task.KEEPS_RUN:
        check_reachable(config)
    with peers.membership():
        if task.NEEDS_DEVICES:
            machine = runtime.start(config.hardware)
        else:
            machine = runtime.start_on_host(config.hardware if getattr(task, "COMPILES", False) else None)
        return _run_on(machine, task, config, choices, overrides=overrides, path=path, config_dir=config_dir)


def _find_task(config: Config) -> Any:
    """The module of a task, or the same names for a function of the user and the constants of its module."""
    name = config.task.name
    if not is_plug_in(name):
        return importlib.import_module(f"maxhydra.tasks.{name}")
    function = load_object(name, key="task.name")
    module, options = sys.modules[function.__module__], bind_options(function, config.task.options, key="task.name")
    constants = {constant: getattr(module, constant, usual) for constant, usual in USUAL.items()}
    return SimpleNamespace(run=partial(function, **options), **constants)


def _run_on(
    machine: Machine,
    task: Any,
    config: Config,
    choices: dict[str, str],
    *,
    overrides: list[str],
    path: Path | None,
    config_dir: str | None,
) -> Result:
    if (getattr(task, "TRAINS", False) or config.task.name in MEASURED) and config.hardware.compiled is None:
        machine, config = _choose_remat(machine, config)
    if getattr(task, "TRAINS", False):
        config = resolve_epochs(config)
    path = path or config.run.folder() / (config.run.name or _default_name(config, choices))
    is_main = machine.process_index == 0
    folder = RunDirectory(path.absolute(), writes=is_main and task.KEEPS_RUN)
    job = Job(config, choices, machine, folder, tuple(overrides))
    if not task.KEEPS_RUN:
        with logging_to(None, console=False):
            return _result(job, _run_task(job, task), path=None)
    try:
        return _run_stored(job, config_dir, task)
    except RunInUseError as error:
        hint = "wait for it to end, or choose another run.name"
        raise ConfigError(Problem("run.name", str(error), value=config.run.name, hint=hint)) from None
    except NewerFormatError as error:
        raise ConfigError(Problem(str(folder.facts_path), str(error), hint="or choose another run.name")) from None


def _choose_remat(machine: Machine, config: Config) -> tuple[Machine, Config]:
    """Replace model.remat.policy=auto in a task that trains, with a note about the choice."""
    try:
        chosen = with_remat_on(machine, config)
    except ConfigError:  # The task will raise it.
        return machine, config
    if chosen == config:
        return machine, config
    settings = f"model.remat.policy={chosen.model.remat.policy.value}"
    if chosen.train.chunk and config.train.loss_chunk is None:
        settings += f" train.loss_chunk={chosen.train.chunk}"
    note = f"{settings} for {machine.memory_gib:.0f} GiB of device memory"
    return dataclasses.replace(machine, notes=(*machine.notes, note)), chosen


def _run_stored(job: Job, config_dir: str | None, task: Any) -> Result:
    """Run the task with its folder mirrored to the URL in run.outputs, if it is one."""
    is_main, result = job.machine.process_index == 0, None
    try:
        with stored_run(job.config, job.run, job.machine) as storage:
            result = _finished_before(job)
            if result is None:
                with logging_to(job.run.log_path if is_main else None, console=is_main):
                    storage.start()
                    result = _run_with_alerts(job, config_dir, task)
    except StorageError as error:
        if result is None:
            raise ConfigError(Problem("run.outputs", str(error), value=job.config.run.outputs)) from error
        reason = f"{result.status}, but {error}; the run is complete in {job.run.path}, the same command uploads it"
        return dataclasses.replace(result, status="failed", reason=reason)
    return result


def _check_name(outputs: Path, name: str) -> None:
    """Raise a ConfigError for an unsuitable name of a new run; existing runs keep their names.

    A run must not be inside another run's folder or contain one: listing runs would not find the inner run, and
    deleting the outer one would delete both.
    """
    folder = outputs / name
    if RunDirectory(folder).exists():
        return
    if problem := new_name_problem(name):
        raise ConfigError(problem)
    parents = [outputs / part for part in Path(name).parents][:-1]
    if outer := next((path for path in parents if RunDirectory(path).exists()), None):
        reason, hint = f"is inside the folder of another run, {outer}", "choose another name"
        raise ConfigError(Problem("run.name", reason, name, hint=hint))
    if inner := next(folder.glob("**/run.json"), None):
        reason = f"is a folder that contains other runs, such as {inner.parent}"
        raise ConfigError(Problem("run.name", reason, name, hint=f"choose another name, or {name}/NAME"))


def _run_with_alerts(job: Job, config_dir: str | None, task: Any) -> Result:
    """Run the task, and send an alert about how it ended."""
    facts = {"run": job.run.path.name, "path": str(job.run.path), "task": job.config.task.name}
    with alerts.attached(job.config.alerts, facts, is_main=job.run.writes):
        try:
            result = _run_recorded(job, config_dir, task)
        except (RunInUseError, NewerFormatError):
            raise
        except Exception as error:
            alerts.send("failed", f"{type(error).__name__}: {error}")
            raise
        alerts.send(result.status, result.reason)
        return result


def _with_alert(event: str, record: Callable[[str], None]) -> Callable[[str], None]:
    """A function that records why the process ends at once, and also sends an alert."""

    def record_and_send(reason: str) -> None:
        record(reason)
        alerts.send(event, reason)
        alerts.flush()

    return record_and_send


def _run_recorded(job: Job, config_dir: str | None, task: Any) -> Result:
    """Run the task in a session of its run, and record how it ended."""
    machine, stored_run = job.machine, stored_values(job.config)["run"]
    session = Session(job.config, {})
    if getattr(task, "TRAINS", False):
        session = prepare_session(job.config, job.run, devices=machine.devices, processes=machine.process_count)
    facts = {
        "task": job.config.task.name,
        "choices": job.choices,
        "overrides": redact_argv(list(job.overrides)),
        **({} if config_dir is None else {"config_dir": config_dir}),
        "tags": stored_run["tags"],
        "notes": stored_run["notes"],
        "hardware": machine.name,
        "devices": f"{machine.devices} x {machine.device_kind}",
        "processes": machine.process_count,
        "xla_flags": machine.xla_flags,
        "seen": machine.notes,
        **session.facts,
    }
    is_recorded = threading.Event()

    def record_forced_exit(reason: str) -> None:
        if not is_recorded.is_set():
            job.run.finish("preempted", reason)

    def record_lost_process(reason: str) -> None:
        if not is_recorded.is_set():
            job.run.fail(reason)

    # A signal while the session is opened would leave a run that says it is running.
    deferral = signals.Deferral()
    deferral.start()
    with deferral, job.run.session(to_stored_yaml(job.config), facts):
        signals.attach_run(_with_alert("preempted", record_forced_exit), processes=machine.process_count)
        peers.attach_run(_with_alert("failed", record_lost_process))
        for path in stored_secrets(job.config):
            log.warning(SECRET_WARNING, path, path)
        try:
            deferral.end()
            signals.check()
            outcome = _run_task(dataclasses.replace(job, config=session.config), task)
        except ConfigError as error:
            # A config error that only the devices or the data could reveal; a new run leaves no folder behind.
            job.run.withdraw("; ".join(str(problem) for problem in error.problems))
            raise
        except BaseException as error:
            if not isinstance(error, signals.Interrupted) and not signals.has_interrupted():
                raise
            # Values that earlier sessions recorded do not change.
            is_recorded.set()
            job.run.finish("preempted", reason := signals.reason())
            return _result(job, Outcome("preempted", reason), path=job.run.path)
        is_recorded.set()
        result = _result(job, outcome, path=job.run.path)
        objective = {"name": job.config.objective, "value": result.objective}
        job.run.finish(outcome.status, outcome.reason, objective=objective, metrics=outcome.metrics, **outcome.facts)
    if outcome.status != "preempted":
        signals.dismiss()
    return result


def _finished_before(job: Job) -> Result | None:
    """The recorded result, if an earlier command with the same config has finished the run; it is not changed.

    The first process decides for all, because the others could read the folder after it has started a session.
    """
    is_finished, facts = False, {}
    if job.run.writes and job.run.exists():
        facts = job.run.read()
        config = job.run.config_path
        is_finished = facts["status"] == "finished" and config.read_text(encoding="utf-8") == to_stored_yaml(job.config)
    if job.machine.process_count > 1:
        is_finished = bool(multihost_utils.broadcast_one_to_all(np.bool_(is_finished)))
    if not is_finished:
        return None
    return Result(
        path=job.run.path,
        status="finished",
        reason=f"{facts.get('reason')} (in an earlier session; choose another run.name to repeat the run)",
        objective=from_number((facts.get("objective") or {}).get("value")),
        writes=job.machine.process_index == 0,
        url=job.config.run.url(job.run.path),
    )


def _run_task(job: Job, task: Any) -> Outcome:
    """Run the task; too little memory is an outcome with a suggestion, not a traceback."""
    require_memory(job.config, job.machine)
    try:
        with explain_out_of_memory(suggest_less_memory(job.config)), peers.naming_lost_processes():
            outcome: Outcome = task.run(job)
    except OutOfMemoryError as error:
        outcome = Outcome("failed", str(error))
    peers.end_task(outcome.reason if outcome.status == "failed" else None)
    if getattr(task, "TRAINS", False):
        track_outcome(job.config, job.run, status=outcome.status, facts=outcome.facts)
    return outcome


def _result(job: Job, outcome: Outcome, *, path: Path | None) -> Result:
    return Result(
        path=path,
        status=outcome.status,
        reason=outcome.reason,
        objective=outcome.metrics.get(job.config.objective),
        writes=job.machine.process_index == 0,
        metrics=outcome.metrics,
        url=None if path is None else job.config.run.url(path),
    )


@contextlib.contextmanager
def atomic_output_dir(path: Path) -> Iterator[Path]:
    """A temporary folder that is renamed to `path` (task.output) once it is complete."""
    if path.exists():
        hint = "choose another folder, or move the existing one"
        raise ConfigError(Problem("task.output", "already exists", value=path, hint=hint))
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _default_name(config: Config, choices: dict[str, str]) -> str:
    """TASK-MODEL-TIME; the time is that of process 0, so that all processes agree on the folder."""
    seconds = int(multihost_utils.broadcast_one_to_all(np.int64(time.time())))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return f"{config.task.name.rpartition(':')[2]}-{choices.get('model', 'run')}-{stamp}"
