"""Progress display of a run: a bar on a terminal, lines elsewhere; log.txt has the lines in either case."""

import datetime
import logging
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

from maxhydra.config.schema.run import Progress as Mode
from maxhydra.record import FILE_ONLY

log = logging.getLogger("maxhydra")


class Progress:
    """Silent display: lines go to log.txt only."""

    def __init__(self, *, total: int):
        self._total, self._clock = total, _Clock(total)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, of training or of evaluation."""
        self._clock.tick(step)
        self._show(step, metrics)

    def message(self, text: str) -> None:
        """Show a message that is not about a step."""
        log.info(text)

    def close(self) -> None:
        pass

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(self._line(step, metrics), extra=FILE_ONLY)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        """`step    10/300  loss 3.214  lr 1.0e-03  grad 1.23  15.2k tok/s  eta 0:01:12`."""
        width = len(str(self._total))
        parts = [f"step {step:>{max(width, 5)}}/{self._total}", *describe(metrics)]
        return "  ".join([*parts, f"eta {self._clock.eta}"] if self._clock.eta else parts)


class _Lines(Progress):
    """A line per update, on stderr and in log.txt."""

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(self._line(step, metrics))


class _Bar(Progress):
    """A live bar with the latest metrics; log lines appear above it."""

    def __init__(self, *, total: int, start: int, console: Console):
        super().__init__(total=total)
        self._bar = RichProgress(
            BarColumn(bar_width=24),
            TaskProgressColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[eta]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="", eta="")
        self._numbers: dict[str, float] = {}
        self._bar.start()

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        super()._show(step, metrics)
        self._numbers |= metrics
        eta = f"eta {self._clock.eta}" if self._clock.eta else ""
        self._bar.update(self._task, completed=step, numbers="  ".join(describe(self._numbers)), eta=eta)

    def close(self) -> None:
        self._bar.stop()


def open_progress(mode: Mode, *, total: int, start: int, shown: bool) -> Progress:
    """The display of a run of `total` steps that starts or resumes at step `start`; only one process shows it."""
    console = Console(stderr=True)
    if mode is Mode.auto:
        mode = Mode.bar if console.is_terminal and not console.is_dumb_terminal else Mode.lines
    if mode is Mode.none or not shown:
        return Progress(total=total)
    return _Bar(total=total, start=start, console=console) if mode is Mode.bar else _Lines(total=total)


# Metrics on the progress line, in order, with their format; the others are only in metrics.jsonl.
_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.3f}",
    "learning_rate": lambda value: f"lr {value:.1e}",
    "grad_norm": lambda value: f"grad {value:.2f}",
    "tokens_per_second": lambda value: f"{_short(value)} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
}
# Evaluation metrics are all shown except these, which are redundant.
_DERIVED = ("eval/perplexity", "eval/tokens")


def describe(metrics: Mapping[str, float]) -> list[str]:
    """The displayed metrics as text."""
    texts = [format_value(metrics[name]) for name, format_value in _FORMATS.items() if name in metrics]
    eval_names = [name for name in metrics if name.startswith("eval/") and name not in _DERIVED]
    return texts + [f"{name} {metrics[name]:.3f}" for name in eval_names]


def _short(value: float) -> str:
    """15210 -> 15.2k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{float(f'{value / size:.3g}'):g}{suffix}"
    return f"{value:.3g}"


class _Clock:
    """Time left at the pace since the first update, which excludes compilation but not evaluations and saves."""

    def __init__(self, total: int):
        self._total = total
        self._first: tuple[int, float] | None = None
        self.eta = ""

    def tick(self, step: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (step, now)
        first_step, start_time = self._first
        if step > first_step:
            seconds = (now - start_time) / (step - first_step) * (self._total - step)
            self.eta = str(datetime.timedelta(seconds=round(seconds))) if step < self._total else ""
