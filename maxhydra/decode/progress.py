"""Progress of offline decoding and scoring on stderr: a bar on a terminal, otherwise a line every ten seconds.

Separate from train/progress.py, which shows metrics per step and writes them to log.txt.
"""

import datetime
import sys
import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, TaskProgressColumn, TextColumn
from rich.progress import Progress as RichProgress

from maxhydra.config.schema.run import Progress as Mode

LINE_SECONDS = 10.0


class Progress:
    """Shows nothing. Counts: items completed in the file, and tokens processed by this process."""

    def __init__(self, *, total: int, start: int):
        self._total, self._start = total, start
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, completed: int, tokens: int) -> None:
        return

    def close(self) -> None:
        return

    def _numbers(self, completed: int, tokens: int) -> str:
        """`1,234 tok/s  eta 0:01:12`."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        parts = [f"{tokens / seconds:,.0f} tok/s"]
        if self._start < completed < self._total:
            eta = (self._total - completed) * seconds / (completed - self._start)
            parts.append(f"eta {datetime.timedelta(seconds=round(eta))}")
        return "  ".join(parts)


class _Lines(Progress):
    def __init__(self, *, total: int, start: int, verb: str):
        super().__init__(total=total, start=start)
        self._verb = verb
        self._last_time = self._began
        self._last = (start, 0)

    def update(self, completed: int, tokens: int) -> None:
        self._last = (completed, tokens)
        if time.monotonic() - self._last_time >= LINE_SECONDS:
            self._print()

    def close(self) -> None:
        self._print()

    def _print(self) -> None:
        self._last_time = time.monotonic()
        print(f"{self._verb} {self._last[0]}/{self._total}  {self._numbers(*self._last)}", file=sys.stderr, flush=True)


class _Bar(Progress):
    def __init__(self, *, total: int, start: int, console: Console):
        super().__init__(total=total, start=start)
        self._bar = RichProgress(
            BarColumn(bar_width=24),
            TaskProgressColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[numbers]}"),
            console=console,
            refresh_per_second=4,
        )
        self._task = self._bar.add_task("", total=total, completed=start, numbers="")
        self._bar.start()

    def update(self, completed: int, tokens: int) -> None:
        self._bar.update(self._task, completed=completed, numbers=self._numbers(completed, tokens))

    def close(self) -> None:
        self._bar.stop()


def open_progress(mode: Mode, *, total: int, start: int, verb: str) -> Progress:
    """Open the display of `total` items of which `start` are completed; `verb` starts each line, e.g. "scored"."""
    console = Console(stderr=True)
    if mode is Mode.auto:
        mode = Mode.bar if console.is_terminal and not console.is_dumb_terminal else Mode.lines
    if mode is Mode.none:
        return Progress(total=total, start=start)
    return (
        _Bar(total=total, start=start, console=console)
        if mode is Mode.bar
        else _Lines(total=total, start=start, verb=verb)
    )
