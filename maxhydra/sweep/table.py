"""A live table of a sweep in the terminal: jobs that run, with step, remaining time and device, and the best so far."""

import dataclasses
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence

from maxhydra.launch.base import Job
from maxhydra.record import scan_metrics, series
from maxhydra.record.log import printable
from maxhydra.runs.settings import get_setting, read_config_text
from maxhydra.runs.summary import format_cell, format_duration

HEAD = ("job", "step", "remaining", "device", "objective")
# Seconds between two drawings.
REFRESH_SECONDS = 1.0
# Escape sequences: cursor up by a number of lines, and erase from the cursor to the end of the screen.
UP, ERASE = "\033[{}A", "\033[J"


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """State of a sweep at one moment."""

    title: str
    counts: Mapping[str, int]
    """Number of jobs by state."""
    running: Sequence[tuple[Job, str]]
    """Running jobs, and where they run."""
    best: str


class JobProgress:
    """Steps and objective of a running job, read from its metrics as they grow."""

    def __init__(self, job: Job):
        config = read_config_text(job.run.config_path)
        self._path = job.run.metrics_path
        self._total, self._objective = get_setting(config, "train.steps"), get_setting(config, "objective")
        self._offset, self._step, self._value = 0, 0, None if self._objective is None else float("nan")
        self._first: tuple[float, int] | None = None

    def row(self, now: float) -> tuple[str, str, str]:
        """Cells of step, remaining time and objective."""
        scan = scan_metrics(self._path, start=self._offset)
        self._offset = scan.end
        if scan.rows:
            self._step = int(scan.rows[-1]["step"])
            self._first = self._first or (now, self._step)
        if values := series(scan.rows, str(self._objective))[1]:
            self._value = values[-1]
        step = f"{self._step}/{self._total}" if self._total else str(self._step)
        has_value = self._value is not None and self._value == self._value
        return step, self._remaining(now), format_cell(self._value) if has_value else ""

    def _remaining(self, now: float) -> str:
        """Time to the last step at the rate since the first reading, which excludes the compilation."""
        if self._first is None or not self._total or self._step <= self._first[1]:
            return ""
        since, first_step = self._first
        return format_duration((self._total - self._step) * (now - since) / (self._step - first_step))


class LiveTable:
    """Shows snapshots in place; lines of output scroll above it."""

    def __init__(self, say: Callable[[str], None]):
        self._say = say
        self._progress: dict[str, JobProgress] = {}
        self._height = 0
        self._drawn_at = float("-inf")

    @property
    def is_due(self) -> bool:
        return time.monotonic() - self._drawn_at >= REFRESH_SECONDS

    def say(self, line: str) -> None:
        self.clear()
        self._say(line)

    def clear(self) -> None:
        """Remove the table from the screen; the next snapshot shows it again."""
        if self._height:
            sys.stdout.write(UP.format(self._height) + "\r" + ERASE)
            sys.stdout.flush()
        self._height, self._drawn_at = 0, float("-inf")

    def draw(self, snapshot: Snapshot) -> None:
        width, height = shutil.get_terminal_size()
        lines = [printable(line, keep="")[: width - 1] for line in self.lines(snapshot, max_rows=max(1, height - 5))]
        self.clear()
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._height, self._drawn_at = len(lines), time.monotonic()

    def lines(self, snapshot: Snapshot, *, max_rows: int) -> list[str]:
        """Summary, at most `max_rows` running jobs, and the best result."""
        counts = ", ".join(f"{count} {state}" for state, count in snapshot.counts.items() if count)
        lines = [f"{snapshot.title}: {counts}"]
        rows = [self._row(job, device) for job, device in snapshot.running[:max_rows]]
        if rows:
            widths = [max(map(len, cells)) for cells in zip(HEAD, *rows, strict=True)]
            lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in (HEAD, *rows)]
        if len(snapshot.running) > max_rows:
            lines.append(f"... and {len(snapshot.running) - max_rows} more")
        return [*lines, f"best: {snapshot.best}"] if snapshot.best else lines

    def _row(self, job: Job, device: str) -> tuple[str, ...]:
        folder = job.trial.folder
        if not job.run.exists():
            return folder, "starting", "", device, ""
        if folder not in self._progress:
            self._progress[folder] = JobProgress(job)
        step, remaining, value = self._progress[folder].row(time.monotonic())
        return folder, step, remaining, device, value
