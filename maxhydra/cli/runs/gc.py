"""Delete runs, or only their checkpoints, after confirmation: gc [CONDITION ...] [--status S,S] [--older 7d] ...

A run is deleted if it matches every condition and every rule. Running runs are never deleted.

maxhydra runs gc --status failed,lost --older 7d
maxhydra runs gc sweep=lr --keep-best 3 --checkpoints
"""

import argparse
import sys

from maxhydra.cli.runs._common import add_conditions, print_runs
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record import RunDirectory, RunInUseError
from maxhydra.runs.gc import Rules, find_disposable, folder_size, parse_duration
from maxhydra.runs.query import select_runs
from maxhydra.runs.registry import STATUSES, Registry, Run


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument("--status", default="", metavar="S,S", help="only runs with this status: failed,lost")
    parser.add_argument("--older", metavar="TIME", help="only runs not modified for this time: 30m, 12h, 7d, 2w")
    parser.add_argument("--keep-best", type=int, metavar="N", help="keep the best N runs of each sweep")
    parser.add_argument("-m", "--metric", help="metric for --keep-best; default: the runs' objective")
    parser.add_argument("--max", action="store_true", help="larger is better")
    parser.add_argument(
        "--checkpoints", action="store_true", help="delete only checkpoints; keep config, metrics and logs"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def run(args: argparse.Namespace) -> int:
    rules = _rules(args)
    registry = Registry(args.outputs)
    runs = find_disposable(registry, select_runs(registry, args.conditions), rules)
    folders = {run.id: registry.root / run.path for run in runs}
    if args.checkpoints:
        runs = [run for run in runs if (folders[run.id] / "checkpoints").is_dir()]
    if not runs:
        print("no runs to delete")
        return 0
    parts = [folders[run.id] / "checkpoints" if args.checkpoints else folders[run.id] for run in runs]
    sizes = dict(zip(runs, map(folder_size, parts), strict=True))
    print_runs(registry, runs, [])
    if not args.yes and not _confirmed(_summary(sizes, args)):
        print("nothing was deleted")
        return 1
    for run in runs:
        directory = RunDirectory(folders[run.id])
        try:
            if args.checkpoints:
                directory.remove_checkpoints()
            else:
                directory.remove()
        except (RunInUseError, OSError) as error:
            print(f"maxhydra: {run.path} was not deleted: {error}", file=sys.stderr)
            del sizes[run]
    print(f"deleted: {_summary(sizes, args)}")
    return 0


def _summary(sizes: dict[Run, int], args: argparse.Namespace) -> str:
    """Return the number of runs and their size in megabytes."""
    part = "the checkpoints of " if args.checkpoints else ""
    return f"{part}{len(sizes)} run{'s' if len(sizes) != 1 else ''}, {sum(sizes.values()) / 1e6:,.1f} MB"


def _rules(args: argparse.Namespace) -> Rules:
    statuses = tuple(filter(None, args.status.split(",")))
    problems = [
        Problem("--status", "no such status", status, ", ".join(STATUSES[1:]), did_you_mean(status, STATUSES[1:]))
        for status in statuses
        if status not in STATUSES[1:]
    ]
    if args.keep_best is not None and args.keep_best < 0:
        problems.append(Problem("--keep-best", "is negative", args.keep_best, "0 or more"))
    if not (statuses or args.older or args.keep_best is not None or args.conditions):
        problems.append(Problem("runs gc", "needs a rule", accepted="a CONDITION, --status, --older or --keep-best"))
    if problems:
        raise ConfigError(problems)
    older = None if args.older is None else parse_duration(args.older)
    return Rules(statuses, older, args.keep_best, args.metric, args.max)


def _confirmed(summary: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(Problem("runs gc", "needs confirmation, but stdin is not a terminal", hint="pass --yes"))
    return input(f"delete {summary}? [y/N] ").strip().lower() in ("y", "yes")
