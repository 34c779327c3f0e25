"""Turns device metrics into lines of metrics.jsonl, one logged step late, so that no device waits for the host."""

import dataclasses
import time
from collections.abc import Mapping

import jax

from maxhydra.record import MetricsWriter, RunDirectory
from maxhydra.train.progress import Progress
from maxhydra.train.trackers import Tracker


@dataclasses.dataclass(frozen=True)
class Work:
    """What one optimizer step amounts to."""

    tokens: int
    flops: float
    devices: int
    peak_tflops: float | None


class Meter:
    """Collects metrics of logged steps and writes them to the jsonl, the trackers and the progress display."""

    def __init__(
        self, work: Work, *, run: RunDirectory, writer: MetricsWriter, tracker: Tracker, progress: Progress, step: int
    ):
        self._work, self._run, self._writer, self._tracker, self._progress = work, run, writer, tracker, progress
        self._pending: tuple[int, Mapping[str, jax.Array], float] | None = None
        self._since, self._last_step, self._waited = time.perf_counter(), step, 0.0
        self.last: dict[str, float] = {}
        self.halted = False

    def waited(self, seconds: float) -> None:
        """The loop waited so long for input."""
        self._waited += seconds

    def log(self, step: int, metrics: Mapping[str, jax.Array]) -> None:
        """Take the metrics of a step that was just dispatched; write those of the logged step before it."""
        waited, self._waited = self._waited, 0.0
        self.flush()
        self._pending = (step, metrics, waited)

    def flush(self) -> None:
        """Write what is pending; waits for the device to finish that step."""
        if self._pending is None:
            return
        (step, on_device, waited), self._pending = self._pending, None
        values = {name: value.item() for name, value in jax.device_get(on_device).items()}
        now = time.perf_counter()
        seconds = now - self._since
        step_time = seconds / max(1, step - self._last_step)
        self._since, self._last_step = now, step
        self.halted = bool(values.pop("halted"))
        values |= self._speed(step_time) | {"input_wait": min(1.0, waited / max(seconds, 1e-9))}
        self.last = values
        self._publish(step, values)

    def evaluated(self, step: int, values: Mapping[str, float]) -> None:
        """Write the metrics of an evaluation, whose time does not count as step time."""
        self._publish(step, values)
        self._since = time.perf_counter()

    def _speed(self, step_time: float) -> dict[str, float]:
        tflops = self._work.flops / step_time / self._work.devices / 1e12
        speed = {
            "step_time": step_time,
            "tokens_per_second": self._work.tokens / step_time,
            "tflops_per_device": tflops,
        }
        return speed if self._work.peak_tflops is None else {**speed, "mfu": tflops / self._work.peak_tflops}

    def _publish(self, step: int, values: Mapping[str, float]) -> None:
        self._writer.write(step, values)
        self._tracker.log(step, values)
        self._progress.update(step, values)
        self._run.heartbeat(end_step=step, last=values)
