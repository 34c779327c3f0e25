"""Helpers that the verbs share: conditions, tables, JSON output, warnings, and starting a run again."""

import argparse
import datetime
import json
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from maxhydra.record.atomic_io import to_json
from maxhydra.record.facts import DEFAULT_OUTPUTS
from maxhydra.record.log import printable
from maxhydra.runs.actions import start_command
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.summary import format_cell, format_duration

# Warnings that are printed one by one; the rest is only counted.
_MAX_WARNINGS = 10
_COLOURS = {"finished": "32", "running": "34", "failed": "31", "preempted": "33", "pruned": "2", "lost": "33"}
WIDEST = 60


def add_conditions(parser: argparse.ArgumentParser) -> None:
    text = "select runs: status=finished, tag=first, train.steps=100, 'eval/loss<2'; all must hold"
    parser.add_argument("conditions", nargs="*", metavar="CONDITION", help=text)


def add_direction(parser: argparse.ArgumentParser) -> None:
    """Add --max and --min as `largest`: True, False, or None for the direction of the metric."""
    group = parser.add_mutually_exclusive_group()
    text = "is better; default: by the metric"
    group.add_argument("--max", action="store_const", const=True, dest="largest", help=f"larger {text}")
    group.add_argument("--min", action="store_const", const=False, dest="largest", help=f"smaller {text}")


def add_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def say(text: str = "", **options: Any) -> None:
    """Print a text of a run without its control characters, which a terminal would execute."""
    print(printable(text), **options)


def print_json(value: Any) -> None:
    say(json.dumps(json.loads(to_json(value)), indent=2, ensure_ascii=False))


def print_warnings(registry: Registry) -> None:
    """Print unreadable files of runs on stderr, so that they never mix with the output that a program parses."""
    faults = registry.read_errors()
    for fault in faults[:_MAX_WARNINGS]:
        say(f"maxhydra: {fault}", file=sys.stderr)
    if len(faults) > _MAX_WARNINGS:
        print(f"maxhydra: and {len(faults) - _MAX_WARNINGS} more unreadable files", file=sys.stderr)


def as_facts(run: Run, **more: Any) -> dict[str, Any]:
    """Return a run as a JSON object."""
    facts = {name: value for name, value in run._asdict().items() if name not in ("id", "change")}
    return {**facts, "sweep": run.sweep, **more}


def print_runs(registry: Registry, runs: Sequence[Run], columns: Sequence[str]) -> None:
    """Print one line per run; `columns` are additional config keys and metrics."""
    extra = {name: registry.values(name, runs) for name in columns}
    objectives = {run.objective for run in runs if run.objective}
    objective = next(iter(objectives)) if len(objectives) == 1 else "objective"
    shown = [] if objective in columns else [objective]
    head = ["run", "status", *shown, *columns, "step", "time", "age", "tags"]
    rows = [
        [
            run.path,
            run.status,
            *([format_cell(run.value)] if shown else []),
            *(format_cell(extra[name].get(run.id)) for name in columns),
            format_cell(run.step),
            format_duration(run.seconds),
            age(run.created),
            " ".join(run.tags),
        ]
        for run in runs
    ]
    print_table(head, rows)


def print_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns, numbers to the right, and a status in its color on a terminal."""
    table = [[printable(cell, keep="") for cell in row] for row in (head, *rows)]
    widths = [min(WIDEST, max(map(len, cells))) for cells in zip(*table, strict=True)]
    right = [all(_is_number(row[column]) for row in rows) for column in range(len(head))]
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


def _is_number(cell: str) -> bool:
    return not cell or cell[0] in "-+.∞0123456789" or cell == "NaN"


def age(moment: str) -> str:
    """Return the time since a moment in one unit: 40 s, 3 m, 5 h, 12 d."""
    seconds = (datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(moment)).total_seconds()
    for size, unit in ((86400, "d"), (3600, "h"), (60, "m")):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(0, int(seconds))} s"


def runs_command(args: argparse.Namespace, verb: str, *arguments: str) -> str:
    """Shell command of another verb on the same folder of runs."""
    outputs = [] if args.outputs == DEFAULT_OUTPUTS else ["-o", args.outputs]
    return shlex.join(["maxhydra", "runs", verb, *outputs, *arguments])


def start(arguments: list[str], folder: str, *, dry: bool) -> int:
    """Replace this process by a run, so that signals and the exit code are the run's; `dry` only prints the command."""
    say(f"cd {shlex.quote(folder)} && {shlex.join(['maxhydra', *arguments])}", flush=True)
    if dry:
        return 0
    command, environment = start_command(arguments, folder)
    os.chdir(folder)
    os.execve(sys.executable, command, environment)
