"""Which runs may go, by rules that a person gave, and taking them away."""

import dataclasses
import datetime
import os
import re
from collections.abc import Sequence
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.query import best
from maxhydra.runs.registry import Registry, Run

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


@dataclasses.dataclass(frozen=True)
class Rules:
    """A run goes if every rule that is given lets it. A run that is under way always stays."""

    statuses: tuple[str, ...] = ()
    older_than: float | None = None
    """Seconds since run.json was last written."""
    keep_best: int | None = None
    """The best so many of each sweep stay, by `metric`."""
    metric: str | None = None
    largest: bool = False


def seconds(text: str) -> float:
    """30m, 12h, 7d, 2w."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text)
    if match is None:
        raise ConfigError(Problem("--older", "is not a time", text, "30m, 12h, 7d, 2w"))
    return float(match[1]) * _UNITS[match[2]]


def disposable(registry: Registry, runs: Sequence[Run], rules: Rules) -> list[Run]:
    """Those of the runs that may go."""
    chosen = [run for run in runs if run.status != "running"]
    if rules.statuses:
        chosen = [run for run in chosen if run.status in rules.statuses]
    if rules.older_than is not None:
        now = datetime.datetime.now(datetime.UTC)
        chosen = [run for run in chosen if (now - _parsed(run.updated)).total_seconds() > rules.older_than]
    if rules.keep_best is not None:
        kept = _best_of_each(registry, runs, rules)
        chosen = [run for run in chosen if run.id not in kept]
    return chosen


def _best_of_each(registry: Registry, runs: Sequence[Run], rules: Rules) -> set[int]:
    sweeps: dict[str, list[Run]] = {}
    for run in runs:
        sweeps.setdefault(run.sweep, []).append(run)
    ranked = [best(registry, alike, rules.metric, largest=rules.largest)[1] for alike in sweeps.values()]
    return {run.id for found in ranked for run in found[: rules.keep_best]}


def size(folder: Path) -> int:
    """Bytes on disk."""
    total = 0
    for here, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(here, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _parsed(moment: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(moment)
