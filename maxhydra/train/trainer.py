"""One training session of a run: initialize or resume, compile, train, close all files.

Every training task calls `train` with its own states, loss and batches. A run that is interrupted and resumed consists
of two sessions.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, closing
from functools import partial
from typing import Any

from maxhydra.config import Config
from maxhydra.config.schema.hardware import Platform
from maxhydra.config.schema.run import Train
from maxhydra.convert.orbax_io import checkpoint_steps
from maxhydra.data import BatchSpec
from maxhydra.model import flops_per_token, parameter_counts
from maxhydra.record import MetricsWriter, NullMetricsWriter, RunDirectory
from maxhydra.record.facts import STATISTICS
from maxhydra.runtime import Machine, signals
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.progress import open_step_progress
from maxhydra.runtime.usage import UsageSampler
from maxhydra.runtime.watchdog import Watchdog
from maxhydra.train.batches import BatchSource
from maxhydra.train.callbacks import Callbacks
from maxhydra.train.checkpoint import open_checkpointer
from maxhydra.train.compile import CompiledSteps, RampedStep, compile_step, hlo_text, obtain_steps, reserve_gpu_headroom
from maxhydra.train.evaluate import Evaluate
from maxhydra.train.executable import check_executable
from maxhydra.train.local_tier import open_local_tier
from maxhydra.train.loop import LoopContext, TrainResult, end_reason, fit, is_evaluation_missing
from maxhydra.train.loss import LossFn, Tree
from maxhydra.train.metrics import MetricsHistory, MetricsLogger, StepCost
from maxhydra.train.restore import InitialState, initialize_or_resume
from maxhydra.train.state import StateFactory
from maxhydra.train.statistics import StatisticsLogger
from maxhydra.train.step import StepFn, sequences_in
from maxhydra.train.trackers import open_trackers

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class TrainingSetup:
    """The parts of a training run that differ between tasks."""

    states: StateFactory
    loss: LossFn
    spec: BatchSpec
    """The rows of a batch."""
    batches: BatchSource
    evaluate: Evaluate | None
    """Evaluates a state on held-out data. None: there is none."""
    initial: Callable[[], Tree] | None = None
    """Returns the base weights that a new run starts from, instead of those that the config names."""
    passes: float = 1.0
    """Forward and backward passes through the model per row of a batch, for the FLOP count."""


def train(training: TrainingSetup, config: Config, *, run: RunDirectory, machine: Machine) -> TrainResult:
    """Train until train.steps, and save the final state. A run that has ended before only returns its result."""
    start_time = time.perf_counter()
    signals.set_phase("before the first step of the session")
    if config.hardware.compiled is not None:
        check_executable(config.hardware.compiled, config, training.states.sharder)
    with signals.Deferral() as deferral, closing(training.batches), ExitStack() as stack:
        example = training.batches.peek()
        pool = stack.enter_context(ThreadPoolExecutor(1))

        def start_compilation() -> Future[CompiledSteps]:
            dump = run.path / "program" if config.hardware.dump_step and run.writes else None
            return pool.submit(obtain_steps, training.states, training.loss, config, example, dump=dump)

        # Compile while the weights are initialized or loaded: for a small model, both take about as long.
        newest = max(checkpoint_steps(run.checkpoints), default=0)
        compilation = None if _ended_at(newest, training, config.train, run) else start_compilation()
        if machine.hardware.platform is Platform.gpu:
            # XLA autotunes kernels on arrays as large as those of the step; weights that are allocated meanwhile would
            # end up behind them, in the middle of the memory that is free afterwards.
            wait([] if compilation is None else [compilation])
        restore_time = time.perf_counter()
        local = open_local_tier(config.checkpoint, run)
        stack.callback(lambda: local.close(newest=max(checkpoint_steps(run.checkpoints), default=0)))
        with reserve_gpu_headroom(training.states.sharder):
            start = initialize_or_resume(
                training.states,
                run.checkpoints,
                config.checkpoint,
                training.batches,
                seed=config.run.seed,
                initial=training.initial,
                local=local,
            )
        spent = {"restore": time.perf_counter() - restore_time}
        _report_start(training, start, run=run, machine=machine)
        if (reason := _ended_at(start.step, training, config.train, run)) is not None:
            history = MetricsHistory.read(run.metrics_path, start=start.step)
            metrics = {**history.last, **history.last_evaluation}
            return TrainResult("finished", reason, start.step, start.state, metrics)
        wait_time = time.perf_counter()
        steps = (compilation or start_compilation()).result()
        # Time that only compilation took: on a GPU all of it, elsewhere what remains after the weights are loaded.
        is_first = machine.hardware.platform is Platform.gpu
        spent["compile"] = steps.seconds if is_first else time.perf_counter() - wait_time
        if training.spec.ramp:
            steps = _ramped_steps(training, config, steps, size=sequences_in(example))
        run.update(timings={"compile": steps.seconds, "before_first_step": time.perf_counter() - start_time})
        run.update(spent={**spent, "init": time.monotonic() - run.session_start - sum(spent.values())})
        context = _loop_context(training, config, steps, start, run=run, machine=machine, stack=stack)
        context = dataclasses.replace(context, local=local)
        return fit(context, start.state, start=start.step, deferral=deferral)


def _ended_at(step: int, training: TrainingSetup, train: Train, run: RunDirectory) -> str | None:
    """Why an earlier session ended the run at its checkpoint of this step; None if there is still something to do."""
    history = MetricsHistory.read(run.metrics_path, start=step)
    if is_evaluation_missing(train, history, evaluates=training.evaluate is not None):
        return None
    return end_reason(train, history, step) if step else None


def _report_start(training: TrainingSetup, start: InitialState, *, run: RunDirectory, machine: Machine) -> None:
    """Log and record the number of parameters and where the run starts."""
    parameters, trained = parameter_counts(training.states.model)
    log.info("%s", "; ".join(machine.notes))
    trained_text = "" if trained == parameters else f", {trained:,} of them trained"
    log.info("%s parameters%s, %s; run %s", f"{parameters:,}", trained_text, start.source, run.path)
    run.update(parameters=parameters, trained_parameters=trained, started_from=start.source, start_step=start.step)


def _ramped_steps(training: TrainingSetup, config: Config, steps: CompiledSteps, *, size: int) -> CompiledSteps:
    """The steps for all batch sizes of the ramp, given those for one of them."""
    sizes = [*(size for _, size in training.spec.ramp), training.spec.batch]

    def ramped(step: StepFn, *, has_statistics: bool) -> StepFn:
        def compile_for(example: Mapping[str, Any]) -> StepFn:
            states, loss = training.states, training.loss
            return compile_step(states, loss, config.train, example, has_statistics=has_statistics)[0]

        return RampedStep(compile_for, sizes, {size: step})

    with_statistics = steps.with_statistics and ramped(steps.with_statistics, has_statistics=True)
    return steps._replace(usual=ramped(steps.usual, has_statistics=False), with_statistics=with_statistics)


def _statistics_writer(run: RunDirectory, *, start: int, is_main: bool) -> MetricsWriter:
    """The file of statistics, without the lines that this session writes again."""
    writer = MetricsWriter(run.path / STATISTICS) if is_main else NullMetricsWriter()
    writer.truncate(start or -1)
    return writer


def _loop_context(
    training: TrainingSetup,
    config: Config,
    steps: CompiledSteps,
    start: InitialState,
    *,
    run: RunDirectory,
    machine: Machine,
    stack: ExitStack,
) -> LoopContext:
    """Open the files and displays of the session, which the stack closes in reverse order."""
    is_main = machine.process_index == 0
    writer = stack.enter_context(closing(MetricsWriter(run.metrics_path) if is_main else NullMetricsWriter()))
    # A session from step 0 repeats the evaluation of step 0.
    writer.truncate(start.step or -1)
    tracker = stack.enter_context(
        closing(open_trackers(config.tracker, run=run, config=config, resumed_from=start.step))
    )
    progress = stack.enter_context(
        closing(open_step_progress(config.train.progress, total=config.train.steps, start=start.step, shown=is_main))
    )
    seq_len = training.spec.rows.seq_len
    peak = machine.hardware.mfu_peak(config.model.dtypes.compute.value, config.quantization)
    if peak is not None:
        log.info("MFU is relative to the %s peak of %g TFLOP/s a device", *peak)
    cost = StepCost(
        tokens=int(training.passes * seq_len),
        flops=training.passes * seq_len * flops_per_token(config.model, seq_len, has_adapter=config.adapter.is_enabled),
        devices=machine.devices,
        peak_tflops=None if peak is None else peak[1],
    )
    history = MetricsHistory.read(run.metrics_path, start=start.step)
    checkpointer = open_checkpointer(run.checkpoints, config.checkpoint, history.evaluations)
    profiler = Profiler(
        config.profile, run.path, process=machine.process_index, program=lambda: hlo_text(steps.for_profile())
    )
    # Only process 0 logs metrics.
    usage = stack.enter_context(closing(UsageSampler(config.statistics.system_seconds if is_main else None)))
    callbacks = Callbacks(config, run, start=start.step)
    metrics = MetricsLogger(
        cost, run=run, writer=writer, trackers=[tracker, callbacks], progress=progress, usage=usage, step=start.step
    )
    open_writer = partial(_statistics_writer, run, start=start.step, is_main=is_main)
    statistics = StatisticsLogger(config.statistics.every, steps.with_statistics, open_writer, config.model)
    return LoopContext(
        train=config.train,
        checkpoint=config.checkpoint,
        step=steps.usual,
        step_for_profile=steps.for_profile,
        batches=training.batches,
        evaluate=training.evaluate,
        checkpointer=stack.enter_context(closing(checkpointer)),
        metrics=metrics,
        history=history,
        watchdog=stack.enter_context(closing(Watchdog(config.watchdog, run.path, process=machine.process_index))),
        profiler=stack.enter_context(closing(profiler)),
        statistics=stack.enter_context(closing(statistics)),
        callbacks=callbacks,
    )
