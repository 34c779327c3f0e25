"""metrics.jsonl: one strict JSON object a line, `step` first. Training and evaluation of one step are separate lines.

NaN and infinities, for which JSON has no number, are the strings "NaN", "Infinity" and "-Infinity"; the reader gives
them back as floats.
"""

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsFloat

from maxhydra.record.atomic_io import NONFINITE, from_number, replace_file, to_json

Row = dict[str, Any]
_NUMBERS = frozenset((int, float))


@dataclasses.dataclass(frozen=True)
class Scan:
    """What could be read of a file from some byte on, whatever state it is in."""

    rows: list[Row]
    bad_lines: list[int]
    """Numbers, from 1 where the reading began, of whole lines that are no metrics."""
    lines: int
    end: int
    """The byte after the last whole line."""
    is_cut: bool
    """Half a line follows: it is being written, or its writer was killed."""


class MetricsWriter:
    """Appends lines; each is handed to the system whole, so that a killed process loses none that was written."""

    def __init__(self, path: Path | str):
        self._path = Path(path)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._file = self._open()

    def _open(self) -> int:
        """Open at the end of the last whole line, and cut off what a kill left after it."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        os.ftruncate(file, _whole_length(self._path.read_bytes()))
        return file

    def write(self, step: int, metrics: Mapping[str, SupportsFloat]) -> None:
        """Add one line."""
        if "step" in metrics:
            raise ValueError("a metric cannot be called 'step'")
        line = (to_json({"step": int(step), **metrics}) + "\n").encode()
        before = os.fstat(self._file).st_size
        try:
            written = os.write(self._file, line)
            if written != len(line):
                raise OSError(f"only {written} of {len(line)} bytes fit on the disk of {self._path}")
        except OSError:
            os.ftruncate(self._file, before)
            raise

    def flush(self) -> None:
        """Have the disk hold all that was written, so that it outlives the machine too."""
        os.fsync(self._file)

    def truncate(self, after_step: int) -> None:
        """Keep the lines up to and including `after_step`: a resumed run writes the later ones again.

        One that cannot be read stays as it is, for whoever looks into it; all readers skip it.
        """
        lines = self._path.read_bytes().split(b"\n")[:-1]
        kept = [line for line in lines if (row := _parse(line)) is None or row["step"] <= after_step]
        replace_file(self._path, "".join(f"{line.decode(errors='replace')}\n" for line in kept))
        os.close(self._file)
        self._file = self._open()

    def close(self) -> None:
        self.flush()
        os.close(self._file)


class NullMetricsWriter(MetricsWriter):
    """Writes nothing: for every process but the first."""

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


def read_metrics(path: Path | str) -> list[Row]:
    """All whole lines in order, without those that are damaged; none where there is no file."""
    return scan_metrics(path).rows


def scan_metrics(path: Path | str, *, start: int = 0) -> Scan:
    """The lines from byte `start` on, which a line begins at; damage is skipped and told. Empty without a file."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            content = file.read()
    except FileNotFoundError:
        content = b""
    length = _whole_length(content)
    lines = content[:length].split(b"\n")[:-1]
    parsed = _parse_together(lines) or [_parse(line) for line in lines]
    rows = [row for row in parsed if row is not None]
    if b"NaN" in content or b"Infinity" in content:
        rows = [{name: from_number(value) for name, value in row.items()} for row in rows]
    bad = [number for number, row in enumerate(parsed, start=1) if row is None]
    return Scan(rows, bad, len(lines), start + length, is_cut=length < len(content))


def _parse_together(lines: list[bytes]) -> Sequence[Row | None] | None:
    """All lines by one call, several times faster than one by one; None where any of them is not a row."""
    try:
        rows = json.loads(b"[" + b",".join(lines) + b"]")
    except ValueError:
        return None
    return rows if len(rows) == len(lines) and all(map(_is_row, rows)) else None


def _parse(line: bytes) -> Row | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if _is_row(row) else None


def _is_row(row: Any) -> bool:
    """A number for every name, an integer for `step`; NaN and infinities are still strings here."""
    if not isinstance(row, dict) or not isinstance(row.get("step"), int):
        return False
    return _NUMBERS.issuperset(map(type, row.values())) or all(
        type(value) in _NUMBERS or value in NONFINITE for value in row.values()
    )


def series(source: Path | str | Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """The steps and values of one metric."""
    rows = read_metrics(source) if isinstance(source, (str, Path)) else source
    points = [(row["step"], row[name]) for row in rows if name in row]
    return [step for step, _ in points], [value for _, value in points]


def _whole_length(content: bytes) -> int:
    """Bytes up to the end of the last whole line."""
    return content.rfind(b"\n") + 1
