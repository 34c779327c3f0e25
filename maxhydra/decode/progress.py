"""How far a file is that goes through a model: a bar on a terminal, a line now and then elsewhere. All on stderr."""

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
    """The silent one. Counts are of answers in the file, and of tokens written by this process."""

    def __init__(self, *, total: int, start: int):
        self._total, self._start = total, start
        self._began = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def update(self, answered: int, tokens: int) -> None:
        return

    def close(self) -> None:
        return

    def _numbers(self, answered: int, tokens: int) -> str:
        """`1,234 tok/s  eta 0:01:12`."""
        seconds = max(time.monotonic() - self._began, 1e-9)
        parts = [f"{tokens / seconds:,.0f} tok/s"]
        if self._start < answered < self._total:
            left = (self._total - answered) * seconds / (answered - self._start)
            parts.append(f"eta {datetime.timedelta(seconds=round(left))}")
        return "  ".join(parts)


class _Lines(Progress):
    def __init__(self, *, total: int, start: int, verb: str):
        super().__init__(total=total, start=start)
        self._verb = verb
        self._said = self._began
        self._last = (start, 0)

    def update(self, answered: int, tokens: int) -> None:
        self._last = (answered, tokens)
        if time.monotonic() - self._said >= LINE_SECONDS:
            self._say()

    def close(self) -> None:
        self._say()

    def _say(self) -> None:
        self._said = time.monotonic()
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

    def update(self, answered: int, tokens: int) -> None:
        self._bar.update(self._task, completed=answered, numbers=self._numbers(answered, tokens))

    def close(self) -> None:
        self._bar.stop()


def open_progress(mode: Mode, *, total: int, start: int, verb: str) -> Progress:
    """The display of `total` answers of which `start` are there; `verb` is what became of them, in a line."""
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
