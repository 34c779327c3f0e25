"""Progress of long work on stderr: a bar on a terminal, lines elsewhere.

`StepProgress` shows the metrics of training steps, and log.txt has its lines in any mode; `ItemProgress` shows the
throughput of decoding and scoring.
"""

import datetime
import logging
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from maxhydra.config.schema.run import Progress as Mode
from maxhydra.record import FILE_ONLY

log = logging.getLogger("maxhydra")

# Seconds between lines of item progress.
LINE_SECONDS = 10.0


class _Display:
    """A context manager that closes itself."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Remove what is displayed live."""


class _Bar:
    """A live bar with text behind it; log lines appear above it."""

    def __init__(self, *, total: int, start: int):
        self._bar = Progress(
            BarColumn(bar_width=24),
            TaskProgressColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[eta]}"),
            console=Console(stderr=True),
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="", eta="")
        self._bar.start()

    def update(self, completed: int, numbers: str, eta: str) -> None:
        self._bar.update(self._task, completed=completed, numbers=numbers, eta=eta)

    def close(self) -> None:
        self._bar.stop()


class _Clock:
    """Time left at the average pace since `first`, a count and its time."""

    def __init__(self, total: int, first: tuple[int, float] | None = None):
        self._total, self._first = total, first
        self.eta = ""
        """`eta 0:01:12`; empty if unknown or at the end."""

    def tick(self, completed: int) -> None:
        now = time.monotonic()
        if self._first is None:
            self._first = (completed, now)
        first, start_time = self._first
        if completed > first:
            seconds = (now - start_time) / (completed - first) * (self._total - completed)
            self.eta = f"eta {datetime.timedelta(seconds=round(seconds))}" if completed < self._total else ""


class StepProgress(_Display):
    """Silent display of steps: lines go to log.txt only."""

    def __init__(self, *, total: int):
        # Starts at the first update, which excludes compilation but not evaluations and saves.
        self._total, self._clock = total, _Clock(total)

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the metrics of a step, of training or of evaluation."""
        self._clock.tick(step)
        self._show(step, metrics)

    def message(self, text: str) -> None:
        """Show a message that is not about a step."""
        log.info(text)

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(self._line(step, metrics), extra=FILE_ONLY)

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        """`step    10/300  loss 3.214  lr 1.0e-03  grad 1.23  15.2k tok/s  eta 0:01:12`."""
        width = len(str(self._total))
        parts = [f"step {step:>{max(width, 5)}}/{self._total}", *describe(metrics), self._clock.eta]
        return "  ".join(filter(None, parts))


class _StepLines(StepProgress):
    """A line per update, on stderr and in log.txt."""

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        log.info(self._line(step, metrics))


class _StepBar(StepProgress):
    """A live bar with the latest metrics."""

    def __init__(self, *, total: int, start: int):
        super().__init__(total=total)
        self._bar = _Bar(total=total, start=start)
        self._numbers: dict[str, float] = {}

    def _show(self, step: int, metrics: Mapping[str, float]) -> None:
        super()._show(step, metrics)
        self._numbers |= metrics
        self._bar.update(step, "  ".join(describe(self._numbers)), self._clock.eta)

    def close(self) -> None:
        self._bar.close()


class ItemProgress(_Display):
    """Silent display of items. Counts: items completed in the file, and tokens processed by this process."""

    def __init__(self, *, total: int, start: int):
        self._total, self._began = total, time.monotonic()
        self._clock = _Clock(total, (start, self._began))

    def update(self, completed: int, tokens: int) -> None:
        """Show the counts so far."""

    def _throughput(self, tokens: int) -> str:
        return f"{tokens / max(time.monotonic() - self._began, 1e-9):,.0f} tok/s"


class _ItemLines(ItemProgress):
    """A line every ten seconds, and one at the end."""

    def __init__(self, *, total: int, start: int, verb: str):
        super().__init__(total=total, start=start)
        self._verb = verb
        self._last_time, self._last = self._began, (start, 0)

    def update(self, completed: int, tokens: int) -> None:
        self._last = (completed, tokens)
        if time.monotonic() - self._last_time >= LINE_SECONDS:
            self.close()

    def close(self) -> None:
        self._last_time = time.monotonic()
        completed, tokens = self._last
        self._clock.tick(completed)
        parts = [f"{self._verb} {completed}/{self._total}", self._throughput(tokens), self._clock.eta]
        print("  ".join(filter(None, parts)), file=sys.stderr, flush=True)


class _ItemBar(ItemProgress):
    """A live bar with the throughput."""

    def __init__(self, *, total: int, start: int):
        super().__init__(total=total, start=start)
        self._bar = _Bar(total=total, start=start)

    def update(self, completed: int, tokens: int) -> None:
        self._clock.tick(completed)
        self._bar.update(completed, self._throughput(tokens), self._clock.eta)

    def close(self) -> None:
        self._bar.close()


def open_step_progress(mode: Mode, *, total: int, start: int, shown: bool) -> StepProgress:
    """The display of a run of `total` steps that starts or resumes at step `start`; only one process shows it."""
    mode = _resolve(mode) if shown else Mode.none
    if mode is Mode.none:
        return StepProgress(total=total)
    return _StepBar(total=total, start=start) if mode is Mode.bar else _StepLines(total=total)


def open_item_progress(mode: Mode, *, total: int, start: int, verb: str) -> ItemProgress:
    """The display of `total` items of which `start` are completed; `verb` starts each line, such as "scored"."""
    mode = _resolve(mode)
    if mode is Mode.none:
        return ItemProgress(total=total, start=start)
    return _ItemBar(total=total, start=start) if mode is Mode.bar else _ItemLines(total=total, start=start, verb=verb)


def _resolve(mode: Mode) -> Mode:
    """The display that `auto` stands for on this terminal."""
    if mode is not Mode.auto:
        return mode
    console = Console(stderr=True)
    return Mode.bar if console.is_terminal and not console.is_dumb_terminal else Mode.lines


# Metrics on the progress line, in order, with their format; the others are only in metrics.jsonl.
_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": lambda value: f"loss {value:.3f}",
    "learning_rate": lambda value: f"lr {value:.1e}",
    "grad_norm": lambda value: f"grad {value:.2f}",
    "tokens_per_second": lambda value: f"{_short(value)} tok/s",
    "mfu": lambda value: f"mfu {value:.1%}",
    "moe/dropped": lambda value: f"dropped {_short(value)}" if value else "",
}
# Evaluation metrics are all shown except these, which are redundant.
_DERIVED = ("eval/perplexity", "eval/tokens")


def describe(metrics: Mapping[str, float]) -> list[str]:
    """The displayed metrics as text."""
    texts = [text for name, show in _FORMATS.items() if name in metrics and (text := show(metrics[name]))]
    eval_names = [name for name in metrics if name.startswith("eval/") and name not in _DERIVED]
    return texts + [f"{name} {metrics[name]:.3f}" for name in eval_names]


def _short(value: float) -> str:
    """15210 -> 15.2k."""
    for size, suffix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{float(f'{value / size:.3g}'):g}{suffix}"
    return f"{value:.3g}"
