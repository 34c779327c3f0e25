"""Writes the metrics of logged steps to metrics.jsonl, the trackers and the progress display.

Metrics are read from the device one logged step late, so that the device never waits for the host.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path

import jax

from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.runtime.progress import StepProgress
from maxhydra.train.trackers import Tracker


@dataclasses.dataclass(frozen=True)
class StepCost:
    """Tokens and FLOP of one sequence, and the devices that process it."""

    tokens: int
    flops: float
    devices: int
    peak_tflops: float | None


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

    def eval_losses(self, name: str) -> list[float]:
        """The values of a metric in all evaluations that have it."""
        return [metrics[name] for metrics in self.evaluations.values() if name in metrics]


@dataclasses.dataclass(frozen=True)
class _LoggedStep:
    """A step whose metrics are still on the device; input wait and sequences are since the previous logged step."""

    step: int
    metrics: Mapping[str, jax.Array]
    data_metrics: Mapping[str, float]
    input_wait: float
    sequences: int


class MetricsLogger:
    """Collects the metrics of logged steps and publishes them."""

    def __init__(
        self,
        cost: StepCost,
        *,
        run: RunDirectory,
        writer: MetricsWriter,
        tracker: Tracker,
        progress: StepProgress,
        step: int,
    ):
        self._cost, self._run, self._writer, self._tracker, self._progress = cost, run, writer, tracker, progress
        self._pending: _LoggedStep | None = None
        self._last_time, self.last_step = time.perf_counter(), step
        self._input_wait, self._sequences = 0.0, 0
        self.last: dict[str, float] = {}
        self.halted = False

    def count_batch(self, sequences: int, *, wait: float) -> None:
        """Count a batch of `sequences` for which the loop waited `wait` seconds."""
        self._sequences += sequences
        self._input_wait += wait

    def log(self, step: int, metrics: Mapping[str, jax.Array], data_metrics: Mapping[str, float]) -> None:
        """Accept the metrics of a step that was just dispatched; write those of the previous logged step."""
        logged = _LoggedStep(step, metrics, data_metrics, self._input_wait, self._sequences)
        self._input_wait, self._sequences = 0.0, 0
        self.flush()
        self._pending = logged

    def flush(self) -> None:
        """Write the pending metrics; waits for the device to finish that step."""
        if self._pending is None:
            return
        logged, self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(logged.metrics).items()}
        now = time.perf_counter()
        seconds = max(now - self._last_time, 1e-9)
        steps = max(1, logged.step - self.last_step)
        self._last_time, self.last_step = now, logged.step
        self.halted = bool(values.pop("halted"))
        values |= {"step_time": seconds / steps} | self._throughput(logged.sequences / seconds)
        values |= {"input_wait": min(1.0, logged.input_wait / seconds), **logged.data_metrics}
        self.last = values
        self._publish(logged.step, values)

    def log_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, whose time does not count as step time."""
        self._publish(step, values)
        self._last_time = time.perf_counter()

    def _throughput(self, sequences_per_second: float) -> dict[str, float]:
        tflops = self._cost.flops * sequences_per_second / self._cost.devices / 1e12
        values = {"tokens_per_second": self._cost.tokens * sequences_per_second, "tflops_per_device": tflops}
        return values if self._cost.peak_tflops is None else {**values, "mfu": tflops / self._cost.peak_tflops}

    def _publish(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)
        self._tracker.log(step, values)
        self._progress.update(step, values)
        self._run.heartbeat(end_step=step, last=values)
