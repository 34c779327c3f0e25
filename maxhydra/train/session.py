"""One session of training in a run's folder: begin or go on, train, leave everything closed and on disk.

Every training task calls `train` with its own loss, batches and state; a run that is interrupted and started again is
two sessions of one run.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import jax

from maxhydra.config import Config
from maxhydra.config.compose import to_dict
from maxhydra.data import Loader
from maxhydra.model import flops_per_token, parameter_count
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.runtime import Machine
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.loop import Ending, Parts, fit
from maxhydra.train.meter import Meter, Work
from maxhydra.train.objective import make_evaluate
from maxhydra.train.progress import open_progress
from maxhydra.train.start import Start, begin
from maxhydra.train.state import StateDef, TrainState
from maxhydra.train.step import Batch, LossFn, StepFn, make_step
from maxhydra.train.trackers import open_trackers

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class Training:
    """What a task brings: how states are made, what is minimised, on which batches."""

    states: StateDef
    loss: LossFn
    loader: Loader
    held_out: Callable[[], Iterator[Batch]]


def train(training: Training, config: Config, *, run: RunDirectory, machine: Machine) -> Ending:
    """Train until config.train.steps; the run's folder tells the rest."""
    began = time.perf_counter()
    start = begin(training.states, run.checkpoints, config.checkpoint, training.loader, seed=config.run.seed)
    run.update(
        parameters=parameter_count(training.states.model.shapes),
        started_from=start.source,
        start_step=start.step,
    )
    if start.step >= config.train.steps:
        reason = f"step {start.step} of {config.train.steps} was reached before; raise train.steps to go on"
        return Ending("finished", reason, start.step, start.state, {})
    with ExitStack() as stack:
        parts = _assemble(training, config, start, run=run, machine=machine, stack=stack)
        step, seconds = compile_step(parts.step, training, start.state)
        run.update(timings={"compile": seconds, "until_first_step": time.perf_counter() - began})
        ending = fit(dataclasses.replace(parts, step=step), start.state, start=start.step)
    return ending
