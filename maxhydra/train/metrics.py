"""Writes the metrics of logged steps to metrics.jsonl, the trackers and the progress display.

Metrics are read from the device one logged step late, so that the device never waits for the host. A thread records
when the device completes a logged step, and throughput is measured from completion to completion. The same metrics
show whether a run learns anything.
"""

import contextlib
import dataclasses
import logging
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from maxhydra.record import MetricsWriter, RunDirectory, read_metrics, series
from maxhydra.runtime import alerts
from maxhydra.runtime.progress import StepProgress
from maxhydra.runtime.usage import UsageSampler
from maxhydra.train.trackers import Tracker

log = logging.getLogger("maxhydra")
# Consecutive skipped steps or equal losses after which the run warns.
MANY = 3
# Batches without a difference between rewards after which the run warns: a policy may solve no prompt of the first few.
MANY_ROLLOUTS = 10
EQUAL_REWARDS = "all rewards are equal within each group (see reward/mean, reward/errors)"


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Tokens and FLOP of one sequence, and the devices that process it."""

    tokens: int
    flops: float
    devices: int
    peak_tflops: float | None
    """Of one device in the dtype of the matmuls; see `Hardware.mfu_peak`."""


@dataclasses.dataclass(frozen=True)
class MetricsHistory:
    """What the run has logged up to the step that a session starts from; the loop adds its own evaluations."""

    start: int
    """The step that the session starts from."""
    last: dict[str, float]
    """The metrics of the last logged training step."""
    evaluations: dict[int, dict[str, float]]
    """The metrics of each evaluation by step, in order."""

    @classmethod
    def read(cls, path: Path, *, start: int) -> "MetricsHistory":
        """Read the rows of metrics.jsonl up to step `start`. A session from step 0 repeats everything."""
        last: dict[str, float] = {}
        evaluations: dict[int, dict[str, float]] = {}
        for row in read_metrics(path) if start else []:
            step, values = row["step"], {name: value for name, value in row.items() if name != "step"}
            if step <= start and any(name.startswith("eval/") for name in values):
                evaluations[step] = values
            elif step <= start:
                last = values
        return cls(start, last, evaluations)

    @property
    def is_empty(self) -> bool:
        return not (self.last or self.evaluations)

    @property
    def last_evaluation(self) -> dict[str, float]:
        return next(reversed(self.evaluations.values()), {})

    def eval_values(self, name: str) -> list[float]:
        """The values of a metric in all evaluations that have it."""
        return [metrics[name] for metrics in self.evaluations.values() if name in metrics]


@dataclasses.dataclass(frozen=True)
class _LoggedStep:
    """A step whose metrics are still on the device; the last three fields are since the previous logged step."""

    step: int
    metrics: Mapping[str, jax.Array]
    data_metrics: Mapping[str, float]
    completed: Future[float]
    """The time at which the device completed the step."""
    input_wait: float
    sequences: int
    paused: float


class MetricsLogger:
    """Collects the metrics of logged steps and publishes them."""

    def __init__(
        self,
        cost: StepCost,
        *,
        run: RunDirectory,
        writer: MetricsWriter,
        trackers: Sequence[Tracker],
        progress: StepProgress,
        usage: UsageSampler,
        step: int,
    ):
        self._cost, self._run, self._writer, self._trackers, self._progress = cost, run, writer, trackers, progress
        self._usage = usage
        self._pending: _LoggedStep | None = None
        self._last_completed, self.last_step = time.perf_counter(), step
        self._input_wait, self._sequences, self._paused = 0.0, 0, 0.0
        self._data_wait = 0.0
        self._latest: Mapping[str, jax.Array] = {}
        """Metrics of the step that was dispatched last."""
        self._clock = ThreadPoolExecutor(1, thread_name_prefix="step-clock")
        self.spent = {"steps": 0.0, "input_wait": 0.0}
        """Seconds of this session by activity: steps, waiting for data, and the reasons of `paused`."""
        self.last: dict[str, float] = {}
        self.halted = False
        self._learning = LearningMonitor(step=step, past_losses=series(run.metrics_path, "loss")[1])

    def count_batch(self, sequences: int, *, wait: float, is_generated: bool = False) -> None:
        """Count a batch of `sequences` for which the loop waited `wait` seconds, or which a rollout generated."""
        if not self._latest:
            # The first interval starts here, after initialization and a first evaluation.
            self._last_completed, self._paused = time.perf_counter() - wait, 0.0
        self._sequences += sequences
        self._input_wait += wait
        self._data_wait += 0.0 if is_generated else wait

    def count_step(self, metrics: Mapping[str, jax.Array]) -> None:
        """Take the metrics of the step that was just dispatched, logged or not; waits for the step before it.

        With more than one step in the queue of a GPU, the end of a step is observed up to one step late.
        """
        jax.block_until_ready(self._latest)
        self._latest = metrics

    @contextlib.contextmanager
    def paused(self, reason: str) -> Iterator[None]:
        """Exclude the time in this context, which starts when the device has completed all steps, from step time."""
        start = _completion_time(self._latest)
        try:
            yield
        finally:
            seconds = time.perf_counter() - start
            self._paused += seconds
            self.spent[reason] = self.spent.get(reason, 0.0) + seconds

    def log(self, step: int, data_metrics: Mapping[str, float]) -> None:
        """Log the step that was just dispatched; write the metrics of the previous logged step."""
        completed = self._clock.submit(_completion_time, self._latest)
        since = (self._input_wait, self._sequences, self._paused)
        logged = _LoggedStep(step, self._latest, data_metrics, completed, *since)
        self._input_wait, self._sequences, self._paused = 0.0, 0, 0.0
        self.flush()
        self._pending = logged

    def flush(self) -> None:
        """Write the pending metrics; waits for the device to finish that step. After a halt, steps change nothing."""
        if self._pending is None or self.halted:
            return
        logged, self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(logged.metrics).items()}
        completed = logged.completed.result()
        seconds = max(completed - self._last_completed - logged.paused, 1e-9)
        steps = max(1, logged.step - self.last_step)
        self._last_completed, self.last_step = completed, logged.step
        self._count_seconds(seconds)
        self.halted = bool(values.pop("halted"))
        values |= {"step_time": seconds / steps} | self._throughput(logged.sequences / seconds)
        values |= {"input_wait": min(1.0, logged.input_wait / seconds), **logged.data_metrics, **self._usage.take()}
        self.last = values
        self._publish(logged.step, values)
        alerts.observe(logged.step, values)
        if not self.halted:
            self._learning.observe(logged.step, values)

    def end_interval(self) -> None:
        """Count the time of the steps since the last logged one; waits for the device to complete them."""
        self._count_seconds(max(0.0, _completion_time(self._latest) - self._last_completed - self._paused))
        self._last_completed, self._paused = time.perf_counter(), 0.0

    def _count_seconds(self, seconds: float) -> None:
        wait, self._data_wait = min(self._data_wait, seconds), 0.0
        self.spent["input_wait"] += wait
        self.spent["steps"] += seconds - wait

    def record_spent(self) -> None:
        """Record the seconds of this session by activity."""
        self._run.heartbeat(spent={name: round(seconds, 3) for name, seconds in self.spent.items()})

    def no_learning(self) -> str | None:
        """The reason why the run has learned nothing from its first step to the last logged one, or None."""
        return self._learning.failure_reason()

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation."""
        self._publish(step, values)

    def _throughput(self, sequences_per_second: float) -> dict[str, float]:
        tflops = self._cost.flops * sequences_per_second / self._cost.devices / 1e12
        values = {"tokens_per_second": self._cost.tokens * sequences_per_second, "tflops_per_device": tflops}
        return values if self._cost.peak_tflops is None else {**values, "mfu": tflops / self._cost.peak_tflops}

    def _publish(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)
        for tracker in self._trackers:
            tracker.log(step, values)
        self._progress.update(step, values)
        self._run.heartbeat(end_step=step, last=values)
        self.record_spent()


def _completion_time(metrics: Mapping[str, jax.Array]) -> float:
    """Wait for the device to compute the metrics of a step; return the time."""
    jax.block_until_ready(metrics)
    return time.perf_counter()


class LearningMonitor:
    """Warns when the updates of a run have no effect, and knows whether that held for all of its steps.

    The count of skipped updates is part of the state and of every logged step, so nothing more is read from the device,
    and updates before a resume and between logged steps are known.
    """

    def __init__(self, *, step: int, past_losses: Sequence[float]):
        self._step, self._skipped = step, None if step else 0
        self._skipped_in_a_row = 0
        self._losses = list(past_losses[-MANY:])
        self._is_loss_constant = len(set(past_losses)) <= 1
        self._warned: set[str] = set()
        self._last_cause = ""
        self._informative_batches: float | None = None

    def observe(self, step: int, values: Mapping[str, float]) -> None:
        """Take the metrics of a logged step, and warn once about each cause."""
        skipped = int(values["skipped"])
        if self._skipped is not None:
            steps, is_idle = step - self._step, skipped - self._skipped == step - self._step
            self._skipped_in_a_row = self._skipped_in_a_row + steps if is_idle else 0
            if is_idle:
                self._last_cause = _skip_cause(values)
                if _is_certain(values) or self._skipped_in_a_row >= MANY:
                    self._warn(self._last_cause, f"at step {step}, {self._last_cause}, so the update is skipped")
        self._step, self._skipped = step, skipped
        self._informative_batches = values.get("groups/informative", self._informative_batches)
        self._observe_loss(step, values["loss"])

    def _observe_loss(self, step: int, loss: float) -> None:
        self._is_loss_constant &= not self._losses or loss == self._losses[-1]
        self._losses = [*self._losses, loss][-MANY:]
        if self._is_unchanged() and self._skipped_in_a_row == 0:
            self._warn("loss", f"the loss is exactly {loss:g} at every logged step up to {step}: nothing changes it")

    def _is_unchanged(self) -> bool:
        """Whether the loss has never changed. On-policy losses of RL are 0 by construction, whatever is learned."""
        return self._is_loss_constant and len(self._losses) >= MANY and self._losses[-1] != 0

    def failure_reason(self) -> str | None:
        """The reason why nothing was learned since the first step of the run, or None."""
        applied = self._step - (self._skipped or 0)
        if self._last_cause == EQUAL_REWARDS and self._step < MANY_ROLLOUTS:
            return None
        # A first update can be the one that breaks everything, such as one with a learning rate of 1e30.
        if not applied or (applied == 1 and self._step > MANY):
            return f"{applied or 'none'} of the {self._step} updates was applied: {self._last_cause}"
        if self._informative_batches == 0 and self._step >= MANY_ROLLOUTS:
            return f"no group of {self._step} batches had different rewards, so no completion was better than another"
        if self._is_unchanged():
            return f"the loss was exactly {self._losses[-1]:g} at every logged step"
        return None

    def _warn(self, cause: str, message: str) -> None:
        if cause not in self._warned:
            self._warned.add(cause)
            log.warning("%s", message)


def _is_certain(values: Mapping[str, float]) -> bool:
    """Whether a single skipped step is worth a warning; a spike is skipped by design."""
    return not values["tokens"] or not values["grad_norm"] > 0 or not _is_finite(values)


def _is_finite(values: Mapping[str, float]) -> bool:
    return math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])


def _skip_cause(values: Mapping[str, float]) -> str:
    """Why a step was skipped. The text is the same for all steps with the same cause."""
    if values.get("groups/degenerate") == 1:
        return EQUAL_REWARDS
    if not values["tokens"]:
        return (
            "no token of the batch has a loss (all are masked: are the prompts longer than train.seq_len? "
            "see data.packing.overlong)"
        )
    if not _is_finite(values):
        return "the loss or the gradient is not finite (train.on_nonfinite=skip)"
    return "the gradient is exactly 0" if not values["grad_norm"] else "loss or gradient norm is a spike (train.spike)"
