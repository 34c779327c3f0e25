"""Take runs, or their checkpoints alone, away by rule, after asking: gc [CONDITION ...] [--status S,S] [--older 7d] ...

A run goes if it meets every condition and every rule; one that is under way always stays.

maxhydra runs gc --status failed,lost --older 7d
maxhydra runs gc sweep=lr --keep-best 3 --checkpoints
"""

import argparse
import sys

from maxhydra.cli.runs._listing import add_conditions, print_runs
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record import RunDirectory, RunInUseError
from maxhydra.runs.gc import Rules, disposable, seconds, size
from maxhydra.runs.query import select
from maxhydra.runs.registry import STATUSES, Registry, Run


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument("--status", default="", metavar="S,S", help="only runs that ended so: failed,lost")
    parser.add_argument("--older", metavar="TIME", help="only runs last written so long ago: 30m, 12h, 7d, 2w")
    parser.add_argument("--keep-best", type=int, metavar="N", help="the best N of each sweep stay")
    parser.add_argument("-m", "--metric", help="for --keep-best; the runs' objective without")
    parser.add_argument("--max", action="store_true", help="larger is better")
    parser.add_argument("--checkpoints", action="store_true", help="only their checkpoints; the record stays")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(asked: argparse.Namespace) -> int:
    rules = _rules(asked)
    registry = Registry(asked.outputs)
    runs = disposable(registry, select(registry, asked.conditions), rules)
    folders = {run.id: registry.root / run.path for run in runs}
    if asked.checkpoints:
        runs = [run for run in runs if (folders[run.id] / "checkpoints").is_dir()]
    if not runs:
        print("nothing to take away")
        return 0
    parts = [folders[run.id] / "checkpoints" if asked.checkpoints else folders[run.id] for run in runs]
    sizes = dict(zip(runs, map(size, parts), strict=True))
    print_runs(registry, runs, [])
    if not asked.yes and not _agreed(_what(sizes, asked)):
        print("nothing was taken away")
        return 1
    for run in runs:
        directory = RunDirectory(folders[run.id])
        try:
            if asked.checkpoints:
                directory.remove_checkpoints()
            else:
                directory.remove()
        except (RunInUseError, OSError) as error:
            print(f"maxhydra: {run.path} stays: {error}", file=sys.stderr)
            del sizes[run]
    print(f"gone: {_what(sizes, asked)}")
    return 0


def _what(sizes: dict[Run, int], asked: argparse.Namespace) -> str:
    """So many runs, or their checkpoints, of so many megabytes."""
    part = "the checkpoints of " if asked.checkpoints else ""
    return f"{part}{len(sizes)} run{'s' if len(sizes) != 1 else ''}, {sum(sizes.values()) / 1e6:,.1f} MB"


def _rules(asked: argparse.Namespace) -> Rules:
    statuses = tuple(filter(None, asked.status.split(",")))
    problems = [
        Problem("--status", "no such status", status, ", ".join(STATUSES[1:]), did_you_mean(status, STATUSES[1:]))
        for status in statuses
        if status not in STATUSES[1:]
    ]
    if asked.keep_best is not None and asked.keep_best < 0:
        problems.append(Problem("--keep-best", "is negative", asked.keep_best, "0 or more"))
    if not (statuses or asked.older or asked.keep_best is not None or asked.conditions):
        problems.append(Problem("runs gc", "needs a rule", accepted="a CONDITION, --status, --older or --keep-best"))
    if problems:
        raise ConfigError(problems)
    older = None if asked.older is None else seconds(asked.older)
    return Rules(statuses, older, asked.keep_best, asked.metric, asked.max)


def _agreed(what: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(Problem("runs gc", "asks first, and there is nobody to ask", hint="--yes goes ahead"))
    return input(f"take away {what}? [y/N] ").strip().lower() in ("y", "yes")
