"""Garbage collection of runs: which runs may be deleted under the given rules."""

import dataclasses
import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.query import rank_runs
from maxhydra.runs.registry import Registry, Run

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclasses.dataclass(frozen=True)
class Rules:
    """A run is deleted if every given rule allows it. Running runs are never deleted."""

    statuses: tuple[str, ...] = ()
    older_than: float | None = None
    """Minimum age in seconds, counted from the last write of run.json."""
    keep_best: int | None = None
    """Keep this many of the best runs of each sweep, by `metric`."""
    metric: str | None = None
    largest: bool | None = None
    """Whether larger values of the metric are better; None: by the metric."""


def parse_duration(text: str) -> float:
    """Parse a duration: 30m, 12h, 7d, 2w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if match is None:
        raise ConfigError(Problem("--older", "is not a duration", text, "30m, 12h, 7d, 2w"))
    return float(match[1]) * _UNITS[match[2]]


def find_disposable(registry: Registry, runs: Sequence[Run], rules: Rules) -> list[Run]:
    """Runs that may be deleted."""
    candidates = [run for run in runs if run.status != "running"]
    if rules.statuses:
        candidates = [run for run in candidates if run.status in rules.statuses]
    if rules.older_than is not None:
        now = datetime.datetime.now(datetime.UTC)
        candidates = [run for run in candidates if (now - _parse_time(run.updated)).total_seconds() > rules.older_than]
    if rules.keep_best is not None:
        protected = _best_of_each_sweep(registry, runs, rules)
        candidates = [run for run in candidates if run.id not in protected]
    return candidates


def _best_of_each_sweep(registry: Registry, runs: Sequence[Run], rules: Rules) -> set[int]:
    sweeps: dict[str, list[Run]] = {}
    for run in runs:
        sweeps.setdefault(run.sweep, []).append(run)
    rankings = [rank_runs(registry, members, rules.metric, largest=rules.largest).runs for members in sweeps.values()]
    return {run.id for ranking in rankings for run in ranking[: rules.keep_best]}


def folder_size(folder: Path) -> int:
    """Size of a folder on disk in bytes."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _parse_time(text: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text)
