"""Read a run folder for the index, in whatever state its files are: unreadable parts are skipped and reported."""

import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from maxhydra.config.errors import ConfigError
from maxhydra.config.migrations import migrate_config
from maxhydra.record import scan_metrics
from maxhydra.record.atomic_io import NewerFormatError
from maxhydra.record.facts import Facts, parse_facts, rebuild_facts
from maxhydra.record.labels import LABELS, apply_labels, read_labels
from maxhydra.record.metrics import Row
from maxhydra.record.storage import Object, Store, cached_path, fetch_object
from maxhydra.runs import settings as run_settings

RUN, METRICS, CONFIG = "run.json", "metrics.jsonl", "config.yaml"
# Files of a run in a store that are copied to list and report it.
COPIED = (RUN, METRICS, CONFIG, LABELS, "log.txt")
# Message for an incomplete last line, which is normal while the run is running.
INCOMPLETE_LINE = "is half-written"
# Bytes hashed to recognize a file: several lines, which contain step times and so are unique.
_TAIL = 4096
# Folders without runs, but with many files.
_NOT_SEARCHED = ("checkpoints",)


class FileStamp(NamedTuple):
    """Detects changes without opening files. config.yaml and labels.json change only together with run.json."""

    facts: str
    metrics: str


class MetricSummary(NamedTuple):
    """One metric of a run: its last value, finite or not, and its extremes with their steps (None: never finite)."""

    step: int
    last: float
    low: float | None
    low_step: int | None
    high: float | None
    high_step: int | None

    def merge(self, other: "MetricSummary") -> "MetricSummary":
        """Combine with a later part of the run, whose value wins if both have the same step."""
        last = other if other.step >= self.step else self
        low = min((t for t in (self, other) if t.low is not None), key=lambda t: t.low or 0.0, default=other)
        high = max((t for t in (self, other) if t.high is not None), key=lambda t: t.high or 0.0, default=other)
        return MetricSummary(last.step, last.last, low.low, low.low_step, high.high, high.high_step)


class Position(NamedTuple):
    """Read position in metrics.jsonl: a file that grew is read from here, a replaced one from the start."""

    inode: int = 0
    offset: int = 0
    lines: int = 0
    tail: str = ""
    """Digest of the bytes before `offset`, because file systems reuse inode numbers."""


def find_runs(root: Path) -> Iterator[tuple[str, FileStamp]]:
    """Yield every run below a folder by its relative path. Run folders are not searched for nested runs."""
    pending = [""]
    while pending:
        parent = pending.pop()
        for name in _folders(os.path.join(root, parent)):
            path = f"{parent}/{name}" if parent else name
            stamp = _stamp(os.path.join(root, path))
            if stamp is None:
                pending.append(path)
            else:
                yield path, stamp


def copy_runs(url: str) -> Path:
    """A local copy of the small files of all runs below a URL, in which an unchanged run costs one request.

    Raises StorageError.
    """
    store, target = Store(url), cached_path("runs", url)
    target.mkdir(parents=True, exist_ok=True)
    runs: set[str] = set()
    copied: dict[str, Object] = {}
    pending = [""]
    while pending:
        inner: list[str] = []
        for folder, (files, folders) in zip(pending, store.map(store.children, pending), strict=True):
            names = {name.rpartition("/")[2]: name for name in files}
            if RUN in names:
                runs.add(folder)
                copied.update({names[file]: files[names[file]] for file in COPIED if file in names})
            else:
                inner += [name for name in folders if name and name.rpartition("/")[2] not in _NOT_SEARCHED]
        pending = inner
    store.map(lambda name: fetch_object(store, name, copied[name], target / name), copied)
    for path in [path.parent for path in target.rglob(RUN)]:
        if path.relative_to(target).as_posix() not in runs:
            shutil.rmtree(path)
    return target


def _folders(path: str) -> list[str]:
    """Names of the subfolders to search; symbolic links are not followed, so that no run is found twice."""
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
    """None if the folder is not a run."""
    facts = _file_stamp(f"{folder}/{RUN}")
    return None if facts is None else FileStamp(facts, _file_stamp(f"{folder}/{METRICS}") or "")


def _file_stamp(path: str) -> str | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return f"{status.st_ino}:{status.st_size}:{status.st_mtime_ns}"


def read_facts(folder: Path, errors: list[str]) -> Facts | None:
    """Facts of run.json with labels applied, rebuilt from the other files if run.json is damaged; None without it.

    Whether a running run is lost is determined when it is displayed.
    """
    try:
        facts = parse_facts((folder / RUN).read_bytes())
    except NewerFormatError as error:
        errors.append(f"{RUN}: {error}; the run is skipped")
        return None
    except ValueError as error:
        errors.append(f"{RUN}: {error}; the run is listed without it")
        facts = rebuild_facts(folder, f"{RUN} {error}")
    except OSError as error:
        errors.append(f"{RUN}: {_describe(error)}; the run is skipped")
        return None
    try:
        return apply_labels(facts, read_labels(folder))
    except (OSError, ValueError) as error:
        errors.append(f"{LABELS}: {_describe(error)}; skipped")
        return apply_labels(facts, {})


def read_settings(folder: Path, facts: Facts, errors: list[str]) -> list[tuple[str, run_settings.Cell]]:
    """All keys of config.yaml with their values, and all config groups with the chosen options."""
    choices = facts.get("choices")
    groups = (
        [(group, run_settings.cell(option)) for group, option in migrate_config(choices).items()]
        if isinstance(choices, dict)
        else []
    )
    try:
        return [*run_settings.read((folder / CONFIG).read_text(encoding="utf-8")), *groups]
    except FileNotFoundError:
        return groups
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, yaml.YAMLError, ConfigError) as error:
        errors.append(f"{CONFIG}: {_describe(error)}; skipped")
        return groups


def read_metric_summaries(folder: Path, since: Position) -> tuple[Position, dict[str, MetricSummary], list[str]]:
    """Read metrics.jsonl from a position: the new position, a summary of each metric, and read errors."""
    path, errors = folder / METRICS, []
    try:
        inode = path.stat().st_ino
        scan = scan_metrics(path, start=since.offset)
    except FileNotFoundError:
        return Position(), {}, []
    except OSError as error:
        return since, {}, [f"{METRICS}: {_describe(error)}; skipped"]
    for number in scan.bad_lines:
        errors.append(f"{METRICS} line {since.lines + number}: is not a row of numbers with a step; skipped")
    if scan.is_cut:
        errors.append(f"{METRICS} line {since.lines + scan.lines + 1}: {INCOMPLETE_LINE}; skipped")
    now = Position(inode, scan.end, since.lines + scan.lines, tail(path, scan.end))
    return now, _summaries(scan.rows), errors


def tail(path: Path, end: int) -> str:
    """Digest of the last bytes before `end`."""
    try:
        with open(path, "rb") as file:
            start = file.seek(max(0, end - _TAIL))
            return hashlib.sha256(file.read(end - start)).hexdigest()
    except OSError:
        return ""


def _summaries(rows: Iterable[Row]) -> dict[str, MetricSummary]:
    """Summarize metrics. Rows with the same keys are transposed together: a file has two or three sets of keys."""
    rows_by_keys: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        rows_by_keys.setdefault(tuple(row), []).append(row)
    summaries: dict[str, MetricSummary] = {}
    for names, group in rows_by_keys.items():
        columns = dict(zip(names, zip(*map(dict.values, group), strict=True), strict=True))
        steps = columns.pop("step")
        for name, values in columns.items():
            summary = _summarize(steps, values)
            summaries[name] = summaries[name].merge(summary) if name in summaries else summary
    return summaries


def _summarize(steps: Sequence[int], values: Sequence[float]) -> MetricSummary:
    last, step = values[-1], steps[-1]
    if not math.isfinite(sum(values)):
        finite = [(step, value) for step, value in zip(steps, values, strict=True) if math.isfinite(value)]
        if not finite:
            return MetricSummary(step, last, None, None, None, None)
        steps, values = zip(*finite, strict=True)
    low, high = min(values), max(values)
    return MetricSummary(step, last, low, steps[values.index(low)], high, steps[values.index(high)])


def _describe(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"is not JSON (line {error.lineno}: {error.msg})"
        case OSError():
            return str(error.strerror)
        case yaml.YAMLError():
            return "is not YAML"
    return f"is damaged ({error})"
