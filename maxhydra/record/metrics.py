"""metrics.jsonl: one strict JSON object per line, `step` first. Train and eval metrics of a step are separate lines.

NaN and infinities, which JSON cannot represent, are stored as the strings "NaN", "Infinity" and "-Infinity"; the reader
converts them back to floats.
"""

import dataclasses
import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from maxhydra.record.atomic_io import NONFINITE, from_number, replace_file, to_json

Row = dict[str, Any]
_NUMBERS = frozenset((int, float))
# Integers of more digits may not fit into the 64 bits of the index; no float is written with as many.
_LONG_INTEGER = re.compile(rb"\d{19}")
# With this variable set, rows are also printed, for launchers that see the output of a job but not its folder.
STREAM, STREAMED = "MAXHYDRA_METRICS_STREAM", "maxhydra.metrics "


@dataclasses.dataclass(frozen=True)
class Scan:
    """Rows read from a metrics file, which may be damaged or still being written."""

    rows: list[Row]
    bad_lines: list[int]
    """Numbers of complete lines that are not valid rows, counted from 1 at the start of the scan."""
    lines: int
    end: int
    """Byte offset after the last complete line."""
    is_cut: bool
    """True if an incomplete line follows: it is being written, or its writer was killed."""


class MetricsWriter:
    """Appends lines, each with a single write call, so that a killed process loses no completed line."""

    def __init__(self, path: Path | str):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def _open(self) -> int:
        """Open for appending, and truncate an incomplete last line."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(file, _complete_length(self._path.read_bytes()))
        return file

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Append one line."""
        if "step" in metrics:
            raise ValueError("'step' is reserved and cannot be the name of a metric")
        line = (to_json({"step": int(step), **metrics}) + "\n").encode()
        size_before = os.fstat(self._file).st_size
        try:
            num_bytes = os.write(self._file, line)
            if num_bytes != len(line):
                # A file system without space for the whole line writes a part of it and reports no error.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            os.ftruncate(self._file, size_before)
            raise OSError(error.errno, error.strerror, str(self._path)) from None
        if os.environ.get(STREAM):
            print(f"{STREAMED}{line.decode()}", end="", flush=True)

    def flush(self) -> None:
        """Fsync, so that the metrics survive a crash of the machine."""
        os.fsync(self._file)

    def truncate(self, after_step: int) -> None:
        """Drop lines after `after_step`, which a resumed run writes again.

        Damaged lines are kept for inspection; all readers skip them.
        """
        lines = self._path.read_bytes().split(b"\n")[:-1]
        remaining = [line for line in lines if (row := _parse(line)) is None or row["step"] <= after_step]
        replace_file(self._path, "".join(f"{line.decode(errors='replace')}\n" for line in remaining))
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        self.flush()
        os.close(self._file)


class NullMetricsWriter(MetricsWriter):
    """Discards everything; used by all processes except the first."""

    def __init__(self) -> None:
        pass

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        pass

    def flush(self) -> None:
        pass

    def truncate(self, after_step: int) -> None:
        pass

    def close(self) -> None:
        pass


def is_streamed_row(line: str) -> bool:
    return line.startswith(STREAMED)


def append_streamed_rows(path: Path, output: str) -> None:
    """Append the rows in a job's output to a local metrics file that lacks them.

    Steps before the last one of the file are left out: a job that was restarted repeats those after its checkpoint.
    """
    existing = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    rows = scan_metrics(path).rows
    last_step = rows[-1]["step"] if rows else -1
    lines = [line.removeprefix(STREAMED) for line in output.splitlines() if is_streamed_row(line)]
    parsed = [(line, _parse(line.encode())) for line in dict.fromkeys(lines) if line not in existing]
    new = [line for line, row in parsed if row is not None and row["step"] >= last_step]
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write("".join(f"{line}\n" for line in new))


def read_metrics(path: Path | str) -> list[Row]:
    """All valid rows in order, without damaged lines; empty if the file does not exist."""
    return scan_metrics(path).rows


def scan_metrics(path: Path | str, *, start: int = 0) -> Scan:
    """Read rows from byte `start`, the start of a line; skips and reports damaged lines. Empty without a file."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read()
    except (FileNotFoundError, IsADirectoryError):
        content = b""
    length = _complete_length(content)
    lines = content[:length].split(b"\n")[:-1]
    parsed = _parse_all(lines) or [_parse(line) for line in lines]
    if _LONG_INTEGER.search(content, 0, length):
        parsed = [row if row is None or _has_64_bits(row) else None for row in parsed]
    rows = [row for row in parsed if row is not None]
    if b"NaN" in content or b"Infinity" in content:
        rows = [{name: from_number(value) for name, value in row.items()} for row in rows]
    if b"\\u" in content:
        rows = [{name.encode(errors="replace").decode(): value for name, value in row.items()} for row in rows]
    bad = [number for number, row in enumerate(parsed, start=1) if row is None]
    return Scan(rows, bad, len(lines), start + length, is_cut=length < len(content))


def _parse_all(lines: list[bytes]) -> Sequence[Row | None] | None:
    """Parse all lines in one call, which is several times faster; None if any of them is not a valid row."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except (ValueError, RecursionError):
        return None
    return rows if len(rows) == len(lines) and all(map(_is_row, rows)) else None


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    """True if `step` is an integer and all values are numbers, or strings for NaN and infinities."""
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        return False
    return _NUMBERS.issuperset(map(type, row.values())) or all(
        type(value) in _NUMBERS or value in NONFINITE for value in row.values()
    )


def _has_64_bits(row: Row) -> bool:
    return all(type(value) is not int or -(2**63) <= value < 2**63 for value in row.values())


def series(source: Path | str | Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric."""
    rows = read_metrics(source) if isinstance(source, (str, Path)) else source
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def _complete_length(content: bytes) -> int:
    """Number of bytes up to the end of the last complete line."""
    return content.rfind(b"\n") + 1
