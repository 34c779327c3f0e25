"""What the verbs share: conditions, a table for people, JSON for programs, and word of what could not be read."""

import argparse
import datetime
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import to_json
from maxhydra.record.labels import LABELS
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.summary import duration, show

# Named one by one, and not more.
_FAULTS = 10
_COLOURS = {"finished": "32", "running": "34", "failed": "31", "preempted": "33", "lost": "33"}
WIDEST = 60


def add_conditions(parser: argparse.ArgumentParser) -> None:
    text = "which runs: status=finished, tag=first, train.steps=100, 'eval/loss<2'; all must hold"
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=text)


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="for programs")


def print_json(value: Any) -> None:
    print(json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False))


def tell_faults(registry: Registry) -> None:
    """On stderr, so that it never gets into what a program reads."""
    faults = registry.faults()
    for fault in faults[:_FAULTS]:
        print(f"maxhydra: {fault}", file=sys.stderr)
    if len(faults) > _FAULTS:
        print(f"maxhydra: and {len(faults) - _FAULTS} more places that cannot be read", file=sys.stderr)


def label(directory: RunDirectory, **changes: Any) -> None:
    """Tags and a note; ConfigError where those that are there cannot be read, and would be lost."""
    try:
        directory.label(**changes)
    except ValueError as error:
        hint = "mend it, or take it away"
        raise ConfigError(Problem(str(directory.path / LABELS), f"cannot be read: {error}", hint=hint)) from None


def as_facts(run: Run, **more: Any) -> dict[str, Any]:
    """A run for programs."""
    facts = {name: value for name, value in run._asdict().items() if name not in ("id", "change")}
    return {**facts, "sweep": run.sweep, **more}


def print_runs(registry: Registry, runs: Sequence[Run], columns: Sequence[str]) -> None:
    """One line for each run; `columns` are settings and metrics to show besides."""
    extra = {name: registry.values(name, runs) for name in columns}
    objectives = {run.objective for run in runs if run.objective}
    objective = next(iter(objectives)) if len(objectives) == 1 else "objective"
    shown = [] if objective in columns else [objective]
    head = ["run", "status", *shown, *columns, "step", "time", "age", "tags"]
    rows = [
        [
            run.path,
            run.status,
            *([show(run.value)] if shown else []),
            *(show(extra[name].get(run.id)) for name in columns),
            show(run.step),
            duration(run.seconds),
            age(run.created),
            " ".join(run.tags),
        ]
        for run in runs
    ]
    print_table(head, rows)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as they need to be, numbers to the right; a status in its colour on a terminal."""
    table = [list(head), *(list(row) for row in rows)]
    widths = [min(WIDEST, max(map(len, cells))) for cells in zip(*table, strict=True)]
    right = [all(_is_figure(row[column]) for row in rows) for column in range(len(head))]
    is_coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line, row in enumerate(table):
        cells = [_fit(cell, width, right[at]) for at, (cell, width) in enumerate(zip(row, widths, strict=True))]
        if is_coloured:
            cells = [_colour(cell, "2" if line == 0 else _COLOURS.get(cell.strip(), "")) for cell in cells]
        print("  ".join(cells).rstrip())


def _fit(cell: str, width: int, is_right: bool) -> str:
    short = cell if len(cell) <= width else f"{cell[: width - 1]}…"
    return short.rjust(width) if is_right else short.ljust(width)


def _colour(cell: str, code: str) -> str:
    return f"\033[{code}m{cell}\033[0m" if code else cell


def _is_figure(cell: str) -> bool:
    return not cell or cell[0] in "-+.∞0123456789" or cell == "NaN"


def age(moment: str) -> str:
    """How long ago, in one unit: 40 s, 3 m, 5 h, 12 d."""
    seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"
