"""One run's folder as the index keeps it, whatever state its files are in: what cannot be read is skipped and named."""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

import yaml

from maxhydra.config.migrations import migrate_config
from maxhydra.record import scan_metrics
from maxhydra.record.labels import LABELS, labelled, read_labels
from maxhydra.record.liveness import is_lost
from maxhydra.record.metrics import Row
from maxhydra.runs import config_sections
from maxhydra.runs.summary import Facts, wall_seconds

RUN, METRICS, CONFIG = "run.json", "metrics.jsonl", "config.yaml"
# Said of a last line without an end, which is no damage while the run goes on.
HALF = "is half-written"
# Facts of run.json that may be absent, and what they are where they are there.
KINDS = {"objective": dict, "git": dict, "choices": dict, "tags": list, "command": list, "overrides": list}
# Several lines of metrics, with times of steps that are never the same.
_TAIL = 4096
# Folders that hold no runs, and many files.
_NOT_SEARCHED = ("checkpoints",)


class FileStamp(NamedTuple):
    """By which a change is seen, without opening a file. config.yaml and labels change only together with run.json."""

    facts: str
    metrics: str


class MetricSummary(NamedTuple):
    """One metric over a run: its last value, finite or not, and its extremes with their steps (None: never finite)."""

    step: int
    last: float
    low: float | None
    low_step: int | None
    high: float | None
    high_step: int | None

    def then(self, other: "MetricSummary") -> "MetricSummary":
        """Both parts as one; of two values for the same step the other's is the last."""
        last = other if other.step >= self.step else self
        low = min((t for t in (self, other) if t.low is not None), key=lambda t: t.low or 0.0, default=other)
        high = max((t for t in (self, other) if t.high is not None), key=lambda t: t.high or 0.0, default=other)
        return MetricSummary(last.step, last.last, low.low, low.low_step, high.high, high.high_step)


class Position(NamedTuple):
    """How far metrics.jsonl was read: a file that grew is read from there, another one (`inode`, `tail`) anew."""

    inode: int = 0
    offset: int = 0
    lines: int = 0
    tail: str = ""
    """Digest of what stands before `offset`: a file system gives the number of a file that is gone to the next one."""


def find(root: Path) -> Iterator[tuple[str, FileStamp]]:
    """Every run under a folder, by its path relative to it. A run's own folders are not searched for others."""
    waiting = [""]
    while waiting:
        here = waiting.pop()
        for name in _folders(os.path.join(root, here)):
            path = f"{here}/{name}" if here else name
            stamp = _stamp(os.path.join(root, path))
            if stamp is None:
                waiting.append(path)
            else:
                yield path, stamp


def _folders(path: str) -> list[str]:
    """Names of the folders to look into; links are not followed, so that no run is found twice."""
    try:
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if entry.name[0] != "." and entry.name not in _NOT_SEARCHED and entry.is_dir(follow_symlinks=False)
            ]
    except OSError:
        return []


def _stamp(folder: str) -> FileStamp | None:
    """None where the folder is not a run."""
    facts = _mark(f"{folder}/{RUN}")
    return None if facts is None else FileStamp(facts, _mark(f"{folder}/{METRICS}") or "")


def _mark(path: str) -> str | None:
    try:
        seen = os.stat(path)
    except OSError:
        return None
    return f"{seen.st_ino}:{seen.st_size}:{seen.st_mtime_ns}"


def read_facts(folder: Path, faults: list[str]) -> Facts | None:
    """run.json with the labels, as written: whether a running one is lost is for the moment it is looked at to say."""
    try:
        facts = json.loads((folder / RUN).read_bytes())
        # What every run has; asked for here, so that damage shows here.
        facts["status"], wall_seconds(facts), is_lost(facts["sessions"][-1], facts["updated"])
        datetime.fromisoformat(facts["updated"]) - datetime.fromisoformat(facts["created"])
        for name, kind in KINDS.items():
            if not isinstance(facts.get(name) or kind(), kind):
                raise TypeError(f"{name} is no {'object' if kind is dict else 'list'}")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        faults.append(f"{RUN}: {_why(error)}; the run is skipped")
        return None
    try:
        return labelled(facts, read_labels(folder))
    except (OSError, ValueError) as error:
        faults.append(f"{LABELS}: {_why(error)}; skipped")
        return labelled(facts, {})


def read_settings(folder: Path, facts: Facts, faults: list[str]) -> list[tuple[str, config_sections.Cell]]:
    """Every key of config.yaml with its value, and every group with the option that was chosen."""
    chosen = facts.get("choices")
    groups = (
        [(group, config_sections.cell(option)) for group, option in migrate_config(chosen).items()]
        if isinstance(chosen, dict)
        else []
    )
    try:
        return [*config_sections.read((folder / CONFIG).read_text(encoding="utf-8")), *groups]
    except FileNotFoundError:
        return groups
    except (OSError, ValueError, yaml.YAMLError) as error:
        faults.append(f"{CONFIG}: {_why(error)}; skipped")
        return groups


def read_traces(folder: Path, since: Position) -> tuple[Position, dict[str, MetricSummary], list[str]]:
    """How far metrics.jsonl goes, what it holds after a position, and what of that was skipped."""
    path, faults = folder / METRICS, []
    try:
        inode = path.stat().st_ino
        scan = scan_metrics(path, start=since.offset)
    except FileNotFoundError:
        return Position(), {}, []
    except OSError as error:
        return since, {}, [f"{METRICS}: {_why(error)}; skipped"]
    for number in scan.bad_lines:
        faults.append(f"{METRICS} line {since.lines + number}: is not a row of numbers with a step; skipped")
    if scan.is_cut:
        faults.append(f"{METRICS} line {since.lines + scan.lines + 1}: {HALF}; skipped")
    now = Position(inode, scan.end, since.lines + scan.lines, tail(path, scan.end))
    return now, _traces(scan.rows), faults


def tail(path: Path, end: int) -> str:
    """Digest of the last bytes before `end`."""
    try:
        with open(path, "rb") as file:
            start = file.seek(max(0, end - _TAIL))
            return hashlib.sha256(file.read(end - start)).hexdigest()
    except OSError:
        return ""


def _traces(rows: Iterable[Row]) -> dict[str, MetricSummary]:
    """Rows with the same names are turned into columns together: a file has two or three kinds, and many rows."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        kinds.setdefault(tuple(row), []).append(row)
    traces: dict[str, MetricSummary] = {}
    for names, alike in kinds.items():
        columns = dict(zip(names, zip(*map(dict.values, alike), strict=True), strict=True))
        steps = columns.pop("step")
        for name, values in columns.items():
            trace = _trace(steps, values)
            traces[name] = traces[name].then(trace) if name in traces else trace
    return traces


def _trace(steps: Sequence[int], values: Sequence[float]) -> MetricSummary:
    last, step = values[-1], steps[-1]
    if not math.isfinite(sum(values)):
        finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        if not finite:
            return MetricSummary(step, last, None, None, None, None)
        steps, values = zip(*finite, strict=True)
    low, high = min(values), max(values)
    return MetricSummary(step, last, low, steps[values.index(low)], high, steps[values.index(high)])


def _why(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"is not JSON (line {error.lineno}: {error.msg})"
        case OSError():
            return str(error.strerror)
        case KeyError():
            return f"has no {error.args[0]!r}"
        case yaml.YAMLError():
            return "is not YAML"
    return f"is damaged ({error})"
