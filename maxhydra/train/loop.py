"""The training loop shared by all training tasks.

Order of a step: take a batch, dispatch the step, log, evaluate, decide whether to end, save. The host reads the metrics
of a step only after a later one has been dispatched, so the device always has work.
"""

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from maxhydra.config.schema.run import Checkpoint, Train
from maxhydra.train.batches import BatchSource
from maxhydra.train.checkpoint import Checkpointer, SaveFailed
from maxhydra.train.metrics import MetricsLogger
from maxhydra.train.preemption import PreemptionSignal
from maxhydra.train.state import TrainState
from maxhydra.train.step import StepFn, sequences_in

log = logging.getLogger("maxhydra")
# The metric for early stopping and train.target_eval_loss, if the evaluation reports it.
EVAL_LOSS = "eval/loss"


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
    """Everything that the loop calls.

    `evaluate` is None without held-out data; `past_eval_losses` are those before a resume, for early stopping.
    """

    train: Train
    checkpoint: Checkpoint
    step: StepFn
    batches: BatchSource
    evaluate: Callable[[TrainState], dict[str, float]] | None
    checkpointer: Checkpointer
    metrics: MetricsLogger
    past_eval_losses: Sequence[float]


def fit(context: LoopContext, state: TrainState, *, start: int, preemption: PreemptionSignal) -> TrainResult:
    """Train from step `start` to train.steps, or until there is a reason to end earlier."""
    loop = _Loop(context, start)
    if context.train.eval_start and start == 0:
        loop.evaluate(0, state)
    for step in range(start + 1, context.train.steps + 1):
        wait_start = time.perf_counter()
        batch = context.batches.take(state)
        context.metrics.count_batch(sequences_in(batch), wait=time.perf_counter() - wait_start)
        state, metrics = context.step(state, batch)
        if step % context.train.log_every == 0 or step in (start + 1, context.train.steps):
            context.metrics.log(step, metrics, context.batches.metrics())
        if loop.is_evaluation_due(step):
            loop.evaluate(step, state)
        if stop := loop.should_stop(step, preemption):
            return loop.finish(*stop, step, state)
        if step % context.checkpoint.every == 0 and step != context.train.steps:
            loop.save(step, state)
    return loop.finish("finished", f"all {context.train.steps} steps done", context.train.steps, state)


class _Loop:
    """The decisions of the loop and their state: the last evaluation, early stopping, the last save."""

    def __init__(self, context: LoopContext, start: int):
        self._context = context
        self._eval_metrics: dict[str, float] = {}
        self._eval_step = -1
        self._saved_step = start
        self._best_loss = float("inf")
        self._evals_without_improvement = 0
        for loss in context.past_eval_losses:
            self._update_early_stopping(loss)

    def is_evaluation_due(self, step: int) -> bool:
        train = self._context.train
        return step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)

    def evaluate(self, step: int, state: TrainState) -> None:
        if self._context.evaluate is None:
            return
        self._context.metrics.flush()
        if self._context.metrics.halted:
            return
        self._eval_metrics = self._context.evaluate(state)
        self._eval_step = step
        self._context.metrics.log_evaluation(step, self._eval_metrics)
        if EVAL_LOSS in self._eval_metrics:
            self._update_early_stopping(self._eval_metrics[EVAL_LOSS])

    def _update_early_stopping(self, loss: float) -> None:
        """Count evaluations since the last improvement, relative to its loss, so that small improvements add up."""
        if loss < self._best_loss - self._context.train.early_stop.min_delta:
            self._best_loss, self._evals_without_improvement = loss, 0
        else:
            self._evals_without_improvement += 1

    def should_stop(self, step: int, preemption: PreemptionSignal) -> tuple[str, str] | None:
        """(status, reason) if the run should end after this step."""
        train = self._context.train
        if self._context.metrics.halted:
            return "failed", ""
        if name := preemption.requested(step):
            return "preempted", f"{name} at step {step}"
        if self._eval_step != step or EVAL_LOSS not in self._eval_metrics:
            return None
        if train.target_eval_loss is not None and self._eval_metrics[EVAL_LOSS] <= train.target_eval_loss:
            return "finished", f"eval loss {self._eval_metrics[EVAL_LOSS]:.4f} reached train.target_eval_loss"
        if train.early_stop.patience is not None and self._evals_without_improvement >= train.early_stop.patience:
            return "finished", f"eval loss did not improve in {self._evals_without_improvement} evaluations"
        return None

    def save(self, step: int, state: TrainState) -> None:
        """Save, after writing the metrics: the lines up to a checkpoint's step are always on disk."""
        self._context.metrics.flush()
        if self._context.metrics.halted:
            return
        self._wait_for_previous_save()
        try:
            self._write(step, state)
        except SaveFailed as failure:
            log.error("%s; training continues", failure)

    def finish(self, status: str, reason: str, step: int, state: TrainState) -> TrainResult:
        """Write pending metrics and save the final state; if the last save fails, the run fails."""
        context = self._context
        context.metrics.flush()
        if context.metrics.halted:
            step = int(state.step)
            last, detail = context.metrics.last, "set train.log_every=1 to log its loss"
            if context.metrics.last_step == step + 1:
                detail = f"loss {last['loss']}, gradient norm {last['grad_norm']}"
            status, reason = "failed", f"step {step + 1} is not finite ({detail}); its update was not applied"
        elif status == "finished" and not context.train.allow_no_learning and (why := context.metrics.no_learning()):
            status, reason = "failed", f"{why}; train.allow_no_learning=true accepts it"
        metrics = {**context.metrics.last, **self._eval_metrics}
        try:
            if status != "failed" and self._saved_step != step:
                self._wait_for_previous_save()
                self._write(step, state)
            context.checkpointer.wait()
        except SaveFailed as failure:
            status, reason = "failed", str(failure)
        return TrainResult(status, reason, step, state, metrics)

    def _wait_for_previous_save(self) -> None:
        """Wait for the previous save; if it failed, log that and still try the next."""
        try:
            self._context.checkpointer.wait()
        except SaveFailed as failure:
            log.error("%s; training continues", failure)

    def _write(self, step: int, state: TrainState) -> None:
        metrics: Mapping[str, float] = self._eval_metrics if self._eval_step == step else {}
        self._context.checkpointer.save(step, state, self._context.batches.state(), metrics)
        self._saved_step = step
