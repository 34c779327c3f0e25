"""Turns device metrics into lines of metrics.jsonl, one logged step late, so that no device waits for the host."""

import dataclasses
import time
from collections.abc import Mapping

import jax

from maxhydra.record import MetricsWriter, RunDirectory
from maxhydra.train.progress import Progress
from maxhydra.train.trackers import Tracker


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What one sequence amounts to, and what there is to do it with."""

    tokens: int
    flops: float
    devices: int
    peak_tflops: float | None


@dataclasses.dataclass(frozen=True)
class _Logged:
    """A step whose metrics are still on the device; waiting and sequences since the one logged before."""

    step: int
    metrics: Mapping[str, jax.Array]
    data: Mapping[str, float]
    waited: float
    sequences: int


class MetricsLogger:
    """Collects metrics of logged steps and writes them to the jsonl, the trackers and the progress display."""

    def __init__(
        self,
        work: StepCost,
        *,
        run: RunDirectory,
        writer: MetricsWriter,
        tracker: Tracker,
        progress: Progress,
        step: int,
    ):
        self._work, self._run, self._writer, self._tracker, self._progress = work, run, writer, tracker, progress
        self._pending: _Logged | None = None
        self._since, self.last_step = time.perf_counter(), step
        self._waited, self._sequences = 0.0, 0
        self.last: dict[str, float] = {}
        self.halted = False

    def took(self, sequences: int, *, waited: float) -> None:
        """The loop took a batch, and waited so many seconds for it."""
        self._sequences += sequences
        self._waited += waited

    def log(self, step: int, metrics: Mapping[str, jax.Array], data: Mapping[str, float]) -> None:
        """Take the metrics of a step that was just dispatched and of its data; write those of the one logged before."""
        logged = _Logged(step, metrics, data, self._waited, self._sequences)
        self._waited, self._sequences = 0.0, 0
        self.flush()
        self._pending = logged

    def flush(self) -> None:
        """Write what is pending; waits for the device to finish that step."""
        if self._pending is None:
            return
        logged, self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(logged.metrics).items()}
        now = time.perf_counter()
        seconds = max(now - self._since, 1e-9)
        steps = max(1, logged.step - self.last_step)
        self._since, self.last_step = now, logged.step
        self.halted = bool(values.pop("halted"))
        values |= {"step_time": seconds / steps} | self._speed(logged.sequences / seconds)
        values |= {"input_wait": min(1.0, logged.waited / seconds), **logged.data}
        self.last = values
        self._publish(logged.step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, whose time does not count as step time."""
        self._publish(step, values)
        self._since = time.perf_counter()

    def _speed(self, sequences: float) -> dict[str, float]:
        """What so many sequences a second come to."""
        tflops = self._work.flops * sequences / self._work.devices / 1e12
        speed = {"tokens_per_second": self._work.tokens * sequences, "tflops_per_device": tflops}
        return speed if self._work.peak_tflops is None else {**speed, "mfu": tflops / self._work.peak_tflops}

    def _publish(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)
        self._tracker.log(step, values)
        self._progress.update(step, values)
        self._run.heartbeat(end_step=step, last=values)
