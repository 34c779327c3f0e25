"""One session of training in a run's folder: begin or go on, train, leave everything closed and on disk.

Every training task calls `train` with its own states, loss and batches; a run that is interrupted and started again is
two sessions of one run.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from typing import Any

import jax

from maxhydra.config import Config
from maxhydra.config.schema.hardware import Platform
from maxhydra.config.schema.run import Train
from maxhydra.data import BatchSpec
from maxhydra.model import flops_per_token, parameter_counts
from maxhydra.record import MetricsWriter, NullMetricsWriter, RunDirectory, series
from maxhydra.runtime import Machine
from maxhydra.train.batches import BatchSource
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.compile import RampedStep, reserve_gpu_headroom
from maxhydra.train.loop import LoopContext, TrainResult, fit
from maxhydra.train.metrics import MetricsLogger, StepCost
from maxhydra.train.objectives import Evaluate
from maxhydra.train.preemption import PreemptionSignal
from maxhydra.train.progress import open_progress
from maxhydra.train.restore import InitialState, begin
from maxhydra.train.state import StateFactory, Tree
from maxhydra.train.step import LossFn, StepFn, make_step, sequences_in
from maxhydra.train.trackers import open_trackers

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """What a task brings: how states are made, what is minimised, on which batches."""

    states: StateFactory
    loss: LossFn
    spec: BatchSpec
    """Of the rows that a step takes."""
    batches: BatchSource
    evaluate: Evaluate | None
    """Measures a state on what is held out. None: nothing is."""
    initial: Callable[[], Tree] | None = None
    """Gives the weights of the model that a new run starts from, where the config does not say."""
    passes: float = 1.0
    """Forward and backward passes over the model for each row of a batch, for the account of arithmetic."""


def train(training: TrainingSetup, config: Config, *, run: RunDirectory, machine: Machine) -> TrainResult:
    """Train until train.steps, and save the end."""
    began = time.perf_counter()
    with PreemptionSignal() as interrupt, closing(training.batches), ExitStack() as stack:
        example = training.batches.peek()
        # The step compiles while the weights are made or read: on a small model either takes as long as the other.
        compiling = stack.enter_context(ThreadPoolExecutor(1)).submit(compile_step, training, config, example)
        if machine.hardware.platform is Platform.gpu:
            # There the compiler tries kernels on arrays as large as those of the step, and weights that are made
            # meanwhile would come to lie behind them, in the middle of what is free afterwards.
            wait([compiling])
        with reserve_gpu_headroom(training.states.sharder):
            start = begin(
                training.states,
                run.checkpoints,
                config.checkpoint,
                training.batches,
                seed=config.run.seed,
                initial=training.initial,
            )
        parameters, trained = parameter_counts(training.states.model)
        log.info("%s", "; ".join(machine.notes))
        of_them = "" if trained == parameters else f", {trained:,} of them trained"
        log.info("%s parameters%s, %s; run %s", f"{parameters:,}", of_them, start.source, run.path)
        run.update(parameters=parameters, trained_parameters=trained, started_from=start.source, start_step=start.step)
        if start.step >= config.train.steps:
            reason = f"step {start.step} was reached before; raise train.steps to go on"
            return TrainResult("finished", reason, start.step, start.state, {})
        first, seconds = compiling.result()
        step = first
        if training.spec.ramp:
            sizes = [*(size for _, size in training.spec.ramp), training.spec.batch]
            compiled = {sequences_in(example): first}
            step = RampedStep(lambda batch: compile_step(training, config, batch)[0], sizes, compiled)
        run.update(timings={"compile": seconds, "before_first_step": time.perf_counter() - began})
        parts = _assemble(training, config, step, start, run=run, machine=machine, stack=stack)
        return fit(parts, start.state, start=start.step, interrupt=interrupt)


def compile_step(training: TrainingSetup, config: Config, example: Mapping[str, Any]) -> tuple[StepFn, float]:
    """The step compiled for batches like the example, and how long that took. A state is given up to its successor."""
    began = time.perf_counter()
    compiled = trace_step(training.states, training.loss, config.train, example).lower().compile()
    return compiled, time.perf_counter() - began


def trace_step(states: StateFactory, loss: LossFn, train: Train, example: Mapping[str, Any]) -> jax.stages.Traced:
    """The step on its way to the compiler, for the devices of the states' mesh."""
    step = jax.jit(
        make_step(loss, states.optimizer, train, states.model.settled, states.model.cast),
        donate_argnums=0,
        out_shardings=(states.shardings(), None),
    )
    return step.trace(states.abstract(), example)


def _assemble(
    training: TrainingSetup,
    config: Config,
    step: StepFn,
    start: InitialState,
    *,
    run: RunDirectory,
    machine: Machine,
    stack: ExitStack,
) -> LoopContext:
    """Open the files and displays of the session, which the stack closes in reverse order."""
    is_main = machine.process_index == 0
    writer = stack.enter_context(closing(MetricsWriter(run.metrics_path) if is_main else NullMetricsWriter()))
    writer.truncate(start.step)
    tracker = stack.enter_context(
        closing(open_trackers(config.tracker, run=run, config=config, resumed_from=start.step))
    )
    progress = stack.enter_context(
        closing(open_progress(config.train.progress, total=config.train.steps, start=start.step, shown=is_main))
    )
    seq_len = training.spec.rows.seq_len
    work = StepCost(
        tokens=int(training.passes * seq_len),
        flops=training.passes * seq_len * flops_per_token(config.model, seq_len),
        devices=machine.devices,
        peak_tflops=machine.peak_tflops(config.model.dtypes.compute.value),
    )
    return LoopContext(
        train=config.train,
        saving=config.checkpoint,
        step=step,
        batches=training.batches,
        evaluate=training.evaluate,
        checkpointer=stack.enter_context(closing(open_checkpointer(run.checkpoints, config.checkpoint))),
        meter=MetricsLogger(work, run=run, writer=writer, tracker=tracker, progress=progress, step=start.step),
        past_eval_losses=series(run.metrics_path, "eval/loss")[1],
    )
