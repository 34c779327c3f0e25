"""The training loop shared by all training tasks.

Order of a step: take a batch, dispatch the step, log, evaluate, decide whether to end, save. The host reads the metrics
of a step only after a later one has been dispatched, so the device always has work.

Every decision follows from the step and the evaluations so far, including those of earlier sessions, which are in
metrics.jsonl. A signal abandons a running evaluation or rollout; the session that resumes repeats it.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.config.schema.metrics import EVAL_LOSS, is_maximized
from maxhydra.config.schema.run import Train
from maxhydra.runtime import peers, signals
from maxhydra.runtime.profiler import Profiler
from maxhydra.runtime.watchdog import Watchdog
from maxhydra.train.batches import BatchSource, LoaderBatches
from maxhydra.train.callbacks import Callbacks
from maxhydra.train.checkpoint import NO_LOCAL_TIER, Checkpointer, SaveFailed, saved_trees
from maxhydra.train.local_tier import LocalTier
from maxhydra.train.loss import ROW_VALUES, Batch
from maxhydra.train.metrics import MetricsHistory, MetricsLogger
from maxhydra.train.save_schedule import SaveSchedule, Tier
from maxhydra.train.state import TrainState
from maxhydra.train.statistics import StatisticsLogger
from maxhydra.train.step import StepFn, sequences_in

log = logging.getLogger("maxhydra")


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How the loop ended: `status` is a run status, `step` the last completed step, `state` the state after it."""

    status: str
    reason: str
    step: int
    state: TrainState
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class LoopContext:
    """Everything that the loop calls. `evaluate` is None without held-out data."""

    train: Train
    checkpoint: Checkpoint
    step: StepFn
    step_for_profile: Callable[[], StepFn]
    batches: BatchSource
    evaluate: Callable[[TrainState], dict[str, float]] | None
    checkpointer: Checkpointer
    metrics: MetricsLogger
    history: MetricsHistory
    watchdog: Watchdog
    profiler: Profiler
    statistics: StatisticsLogger
    callbacks: Callbacks
    local: LocalTier = NO_LOCAL_TIER
    """Checkpoints on the disks of the hosts."""

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Once the device has completed all steps, do something else: the time is not step time."""
        with self.metrics.paused(reason), self.watchdog.paused():
            yield


def fit(context: LoopContext, state: TrainState, *, start: int, deferral: signals.Deferral) -> TrainResult:
    """Train from step `start` to train.steps, or until there is a reason to end earlier.

    `deferral` starts with the first step: until then a signal ends the session at once, because nothing is lost.
    """
    loop, steps = _Loop(context, start), context.train.steps
    context.callbacks.begin()
    if is_evaluation_missing(context.train, context.history, evaluates=context.evaluate is not None):
        loop.evaluate(start, state)
        if start and (reason := end_reason(context.train, context.history, start)):
            return loop.finish("finished", reason, start, state)
    for step in range(start + 1, steps + 1):
        loop.start_profile(step)
        try:
            batch = loop.take(step, state)
        except signals.Interrupted:
            if step == start + 1:
                raise
            return loop.finish("preempted", f"{signals.requested()} at step {step - 1}", step - 1, state)
        if step == start + 1:
            deferral.start()
            context.watchdog.start(start)
            signals.set_phase("while training, before the state was saved")
        with context.profiler.annotate(step):
            state, metrics = context.statistics.choose(step, loop.step)(state, batch)
        context.statistics.log(step, metrics)
        if (row_values := metrics.pop(ROW_VALUES, None)) is not None:
            context.batches.observe(step, row_values)
        peers.report_step(step)
        context.watchdog.count_step(step, metrics["loss"])
        context.metrics.count_step(metrics)
        loop.stop_profile(step)
        if step % context.train.log_every == 0 or step in (start + 1, steps):
            context.metrics.log(step, context.batches.metrics())
        if is_evaluation_due(context.train, step):
            with contextlib.suppress(signals.Interrupted):
                loop.evaluate(step, state)
        if stop := loop.should_stop(step):
            return loop.finish(*stop, step, state)
        if step != steps:
            loop.save_if_due(step, state)
    return loop.finish("finished", f"all {steps} steps done", steps, state)


def is_evaluation_due(train: Train, step: int) -> bool:
    return step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)


def is_evaluation_missing(train: Train, history: MetricsHistory, *, evaluates: bool) -> bool:
    """Whether a session begins with an evaluation of the state that it starts from.

    That of step 0 belongs to the start; that of a later step was abandoned when a signal ended the previous session.
    """
    start = history.start
    if not evaluates or start in history.evaluations:
        return False
    if start == 0:
        return train.eval_start
    return not history.is_empty and start <= train.steps and is_evaluation_due(train, start)


def end_reason(train: Train, history: MetricsHistory, step: int) -> str | None:
    """Why the run ends after this step; None if it continues. Early stopping judges every evaluation once, in order."""
    metrics, early_stop = history.evaluations.get(step, {}), train.early_stop
    if EVAL_LOSS in metrics and train.target_eval_loss is not None and metrics[EVAL_LOSS] <= train.target_eval_loss:
        return f"eval loss {metrics[EVAL_LOSS]:.4f} reached train.target_eval_loss"
    if early_stop.metric in metrics and early_stop.patience is not None:
        sign = -1 if is_maximized(early_stop.metric) else 1
        values = [sign * value for value in history.eval_values(early_stop.metric)]
        stale = _evaluations_without_improvement(values, early_stop.min_delta)
        if stale >= early_stop.patience:
            name = "eval loss" if early_stop.metric == EVAL_LOSS else early_stop.metric
            return f"{name} did not improve in {stale} evaluations"
    if step > train.steps:
        return f"step {step} was already reached; raise train.steps to continue"
    return f"all {train.steps} steps done" if step == train.steps else None


def _evaluations_without_improvement(losses: list[float], min_delta: float) -> int:
    """Evaluations since the last improvement, relative to its loss, so that small improvements add up."""
    best, count = float("inf"), 0
    for loss in losses:
        best, count = (loss, 0) if loss < best - min_delta else (best, count + 1)
    return count


class _Loop:
    """The state of the loop: the latest evaluation and the last save."""

    def __init__(self, context: LoopContext, start: int):
        self._context = context
        self._saved_step = start
        self._pending_save: int | None = None
        self.step = context.step
        self._schedule = SaveSchedule(
            context.checkpoint, is_saving=lambda: context.checkpointer.is_saving() or context.local.is_saving()
        )
        # Evaluations run in a thread, so that the main thread can react to a signal while one compiles.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="evaluate")

    def take(self, step: int, state: TrainState) -> Batch:
        """The batch of a step, with the time that the loop waited for it."""
        wait_start = time.perf_counter()
        batch = self._context.batches.take(step, state)
        seconds, is_generated = time.perf_counter() - wait_start, not isinstance(self._context.batches, LoaderBatches)
        self._context.metrics.count_batch(sequences_in(batch), wait=seconds, is_generated=is_generated)
        return batch

    def start_profile(self, step: int) -> None:
        """Start a profile before this step if one is due."""
        if self._context.profiler.is_due(step):
            with self._context.paused("profile"):
                self.step = self._context.step_for_profile()
                self._context.profiler.start(step)

    def stop_profile(self, step: int) -> None:
        """Write the profile after this step if it is complete."""
        if self._context.profiler.is_complete(step):
            with self._context.paused("profile"):
                self._context.profiler.stop()
            self.step = self._context.step

    def evaluate(self, step: int, state: TrainState) -> None:
        """Evaluate and log; raises Interrupted, and logs nothing, if a signal arrives."""
        if self._context.evaluate is None:
            return
        self._context.metrics.flush()
        if self._context.metrics.halted:
            return
        with self._context.paused("eval"):
            evaluated = state.exchange_average()
            if signals.is_distributed():
                metrics = self._context.evaluate(evaluated)
            else:
                metrics = signals.wait(self._worker.submit(self._context.evaluate, evaluated))
        self._context.history.evaluations[step] = metrics
        self._context.metrics.log_evaluation(step, metrics)

    def should_stop(self, step: int) -> tuple[str, str] | None:
        """(status, reason) if the run should end after this step; a signal during the last one changes nothing."""
        context = self._context
        if context.metrics.halted:
            return "failed", ""
        name = signals.requested()
        is_evaluated = step in context.history.evaluations or context.evaluate is None
        is_complete = is_evaluated or not is_evaluation_due(context.train, step)
        if is_complete and (reason := end_reason(context.train, context.history, step)):
            return "finished", reason
        interrupted = "" if is_complete else ", during its evaluation"
        return None if name is None else ("preempted", f"{name} at step {step}{interrupted}")

    def save_if_due(self, step: int, state: TrainState) -> None:
        """Save, after writing the metrics: the lines up to a checkpoint's step are always on disk."""
        tier = self._schedule.due_tier(step)
        if tier is None:
            return
        self._context.statistics.flush()
        self._context.metrics.flush()
        if self._context.metrics.halted:
            return
        with self._context.paused("save"), self._schedule.measure(step, tier):
            if tier is Tier.local:
                self._context.local.save(step, saved_trees(state), self._context.batches.state())
                return
            self._wait_for_previous_save()
            try:
                self._write(step, state)
            except SaveFailed as failure:
                log.error("%s; training continues", failure)

    def finish(self, status: str, reason: str, step: int, state: TrainState) -> TrainResult:
        """Write pending metrics and save the final state; if the last save fails, the run fails."""
        context = self._context
        context.statistics.flush()
        context.metrics.flush()
        context.metrics.end_interval()
        context.watchdog.close()
        if context.metrics.halted:
            step = int(state.step)
            last, detail = context.metrics.last, "set train.log_every=1 to log its loss"
            if context.metrics.last_step == step + 1:
                detail = f"loss {last['loss']}, gradient norm {last['grad_norm']}"
            status, reason = "failed", f"step {step + 1} is not finite ({detail}); its update was not applied"
        elif status == "finished" and not context.train.allow_no_learning and (why := context.metrics.no_learning()):
            status, reason = "failed", f"{why}; train.allow_no_learning=true accepts it"
        metrics = {**context.history.last, **context.metrics.last, **context.history.last_evaluation}
        try:
            with context.metrics.paused("save"):
                # Before the last save, which waits for all processes: none ends while another copies its files.
                context.local.wait()
                if status != "failed" and self._saved_step != step:
                    self._wait_for_previous_save()
                    self._write(step, state)
                self._complete_save()
        except SaveFailed as failure:
            status, reason = "failed", str(failure)
        context.metrics.record_spent()
        context.callbacks.end(status, step, metrics)
        signals.set_phase(f"at step {step}")
        self._worker.shutdown(wait=False)
        return TrainResult(status, reason, step, state, metrics)

    def _wait_for_previous_save(self) -> None:
        """Wait for the previous save; if it failed, log that and still try the next."""
        try:
            self._complete_save()
        except SaveFailed as failure:
            log.error("%s; training continues", failure)

    def _complete_save(self) -> None:
        """Wait for the checkpoint that is being written."""
        step, self._pending_save = self._pending_save, None
        self._context.checkpointer.wait()
        if step is not None:
            self._context.callbacks.save(step)

    def _write(self, step: int, state: TrainState) -> None:
        metrics: Mapping[str, float] = self._context.history.evaluations.get(step, {})
        self._context.checkpointer.save(step, state, self._context.batches.state(), metrics)
        self._saved_step = self._pending_save = step
