"""Tasks by name: `task.name` is a module here with a function `run(job)`.

A module whose `KEEPS_RUN` is False only prints; for the others `run` opens the run's folder, keeps run.json true
whatever happens, and says how it ended.
"""

import dataclasses
import importlib
import logging
import time
from pathlib import Path

from maxhydra import runtime
from maxhydra.config import Config, ConfigError
from maxhydra.config.compose import to_yaml
from maxhydra.record import RunDirectory, environment
from maxhydra.tasks.job import Job, Outcome

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class Result:
    """What the command reports: the run's folder (None where none is kept), how it ended, the objective's value."""

    path: Path | None
    status: str
    reason: str
    objective: float | None


def run(config: Config, *, choices: dict[str, str], path: Path | None) -> Result:
    """Start the machine and run the task. `path` is the run's folder where a launcher has fixed it already."""
    machine = runtime.start(config.hardware)
    task = importlib.import_module(f"maxhydra.tasks.{config.task.name}")
    if not task.KEEPS_RUN:
        outcome = task.run(Job(config, choices, machine, run=None))
        return Result(None, outcome.status, outcome.reason, outcome.metrics.get(config.objective))

    path = path or Path(config.run.outputs) / (config.run.name or _default_name(config, choices))
    folder = RunDirectory(path.absolute(), writes=machine.process_index == 0)
    with folder.session(to_yaml(config), facts={**environment(), "choices": choices, **machine.facts()}):
        outcome = _guarded(task.run, Job(config, choices, machine, folder))
        objective = outcome.metrics.get(config.objective)
        folder.finish(
            outcome.status,
            outcome.reason,
            metrics=outcome.metrics,
            objective={"name": config.objective, "value": objective},
            **outcome.facts,
        )
    return Result(folder.path, outcome.status, outcome.reason, objective)


def _default_name(config: Config, choices: dict[str, str]) -> str:
    """Task, model and time; the first process's time, so that all of them agree."""
    seconds = runtime.broadcast(int(time.time()))
    stamp = time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))
    return f"{config.task.name}-{choices.get('model', 'model')}-{stamp}"
