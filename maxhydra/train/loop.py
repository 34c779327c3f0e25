"""The one loop of every training task.

Order of a step: take a batch, dispatch the step, log, evaluate, decide whether to end, save. The host reads metrics of
a step only after a later one is under way, so the device always has work.
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
# What an evaluation is judged by, where it has one.
LOSS = "eval/loss"


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """How the loop ended: `status` is a run status, `step` the last one done, `state` its result."""

    status: str
    reason: str
    step: int
    state: TrainState
    metrics: dict[str, float]


@dataclasses.dataclass(frozen=True)
class LoopContext:
    """What a task hands to the loop.

    `evaluate` is None where nothing is held out; `past_eval_losses` are those before a resume, for early stopping.
    """

    train: Train
    saving: Checkpoint
    step: StepFn
    batches: BatchSource
    evaluate: Callable[[TrainState], dict[str, float]] | None
    checkpointer: Checkpointer
    meter: MetricsLogger
    past_eval_losses: Sequence[float]


def fit(parts: LoopContext, state: TrainState, *, start: int, interrupt: PreemptionSignal) -> TrainResult:
    """Train from step `start` to train.steps, or to the first reason to end before."""
    loop = _Loop(parts, start)
    if parts.train.eval_start and start == 0:
        loop.evaluate(0, state)
    for step in range(start + 1, parts.train.steps + 1):
        waiting = time.perf_counter()
        batch = parts.batches.take(state)
        parts.meter.took(sequences_in(batch), waited=time.perf_counter() - waiting)
        state, metrics = parts.step(state, batch)
        if step % parts.train.log_every == 0 or step in (start + 1, parts.train.steps):
            parts.meter.log(step, metrics, parts.batches.metrics())
        if loop.evaluation_due(step):
            loop.evaluate(step, state)
        if ending := loop.ending(step, interrupt):
            return loop.close(*ending, step, state)
        if step % parts.saving.every == 0 and step != parts.train.steps:
            loop.save(step, state)
    return loop.close("finished", f"all {parts.train.steps} steps done", parts.train.steps, state)


class _Loop:
    """The decisions of the loop and what they remember: evaluations so far, the last save."""

    def __init__(self, parts: LoopContext, start: int):
        self._parts = parts
        self._evaluated: dict[str, float] = {}
        self._evaluated_step = -1
        self._saved_step = start
        self._best = float("inf")
        self._without_improvement = 0
        for loss in parts.past_eval_losses:
            self._judge(loss)

    def evaluation_due(self, step: int) -> bool:
        train = self._parts.train
        return step == train.steps or (train.eval_every > 0 and step % train.eval_every == 0)

    def evaluate(self, step: int, state: TrainState) -> None:
        if self._parts.evaluate is None:
            return
        self._parts.meter.flush()
        if self._parts.meter.halted:
            return
        self._evaluated = self._parts.evaluate(state)
        self._evaluated_step = step
        self._parts.meter.evaluated(step, self._evaluated)
        if LOSS in self._evaluated:
            self._judge(self._evaluated[LOSS])

    def _judge(self, loss: float) -> None:
        """Count evaluations since the last improvement: over the loss then, so that small ones add up to one."""
        if loss < self._best - self._parts.train.early_stop.min_delta:
            self._best, self._without_improvement = loss, 0
        else:
            self._without_improvement += 1

    def ending(self, step: int, interrupt: PreemptionSignal) -> tuple[str, str] | None:
        """(status, reason) when the run should end after this step."""
        train = self._parts.train
        if self._parts.meter.halted:
            return "failed", ""
        if name := interrupt.requested(step):
            return "preempted", f"{name} at step {step}"
        if self._evaluated_step != step or LOSS not in self._evaluated:
            return None
        if train.target_eval_loss is not None and self._evaluated[LOSS] <= train.target_eval_loss:
            return "finished", f"eval loss {self._evaluated[LOSS]:.4f} reached train.target_eval_loss"
        if train.early_stop.patience is not None and self._without_improvement >= train.early_stop.patience:
            return "finished", f"no better eval loss in {self._without_improvement} evaluations"
        return None

    def save(self, step: int, state: TrainState) -> None:
        """Save, metrics first: whatever step a checkpoint restores, the lines up to it are on disk."""
        self._parts.meter.flush()
        if self._parts.meter.halted:
            return
        self._settle_earlier()
        try:
            self._write(step, state)
        except SaveFailed as failure:
            log.error("%s; training goes on", failure)

    def close(self, status: str, reason: str, step: int, state: TrainState) -> TrainResult:
        """Write what is pending and save the end; a last save that fails makes the run fail."""
        parts = self._parts
        parts.meter.flush()
        if parts.meter.halted:
            step = int(state.step)
            last, seen = parts.meter.last, "train.log_every=1 would show its loss"
            if parts.meter.last_step == step + 1:
                seen = f"loss {last['loss']}, gradient norm {last['grad_norm']}"
            status, reason = "failed", f"step {step + 1} is not finite ({seen}); its update was not applied"
        metrics = {**parts.meter.last, **self._evaluated}
        try:
            if status != "failed" and self._saved_step != step:
                self._settle_earlier()
                self._write(step, state)
            parts.checkpointer.settle()
        except SaveFailed as failure:
            status, reason = "failed", str(failure)
        return TrainResult(status, reason, step, state, metrics)

    def _settle_earlier(self) -> None:
        """Wait for the save before; that it failed is no reason not to try the next."""
        try:
            self._parts.checkpointer.settle()
        except SaveFailed as failure:
            log.error("%s; training goes on", failure)

    def _write(self, step: int, state: TrainState) -> None:
        metrics: Mapping[str, float] = self._evaluated if self._evaluated_step == step else {}
        self._parts.checkpointer.save(step, state, self._parts.batches.state(), metrics)
        self._saved_step = step
