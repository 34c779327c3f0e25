"""Verbs that label, export and delete runs: tag, note, export and gc."""

import argparse
import sys
from pathlib import Path

from maxhydra.cli.runs._common import (
    add_conditions,
    add_direction,
    print_runs,
    print_warnings,
    say,
)
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record import RunDirectory, RunInUseError
from maxhydra.runs.actions import change_note, change_tags
from maxhydra.runs.export import WRITERS, run_table
from maxhydra.runs.gc import Rules, find_disposable, folder_size, parse_duration
from maxhydra.runs.query import select_runs
from maxhydra.runs.registry import STATUSES, Registry, Run


def declare_tag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("tags", nargs="*", metavar="TAG", help="tags to add")
    parser.add_argument("-r", "--remove", nargs="+", default=[], metavar="TAG", help="tags to remove")


def run_tag(args: argparse.Namespace) -> int:
    """Add tags to a run or remove them, even while it is running: tag RUN TAG ... [-r TAG ...].

    maxhydra runs tag lr/3 keep paper
    maxhydra runs tag lr/3 -r paper
    """
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    tags = change_tags(registry, found, add=args.tags, remove=args.remove)
    say(f"{found.path}: {' '.join(tags) or 'no tags'}")
    return 0


def declare_note(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("text", nargs="?", help="replaces the current note; '' deletes it")


def run_note(args: argparse.Namespace) -> int:
    """Set or show the note of a run, even while it is running: note RUN [TEXT].

    maxhydra runs note lr/3 "the baseline of figure 2"
    """
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    note = registry.facts(found)["notes"] if args.text is None else change_note(registry, found, args.text)
    say(f"{found.path}: {note or 'no note'}")
    return 0


def declare_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="output file; .csv or .parquet")
    add_conditions(parser)


def run_export(args: argparse.Namespace) -> int:
    """Write runs as a table with one row per run: export FILE.csv|FILE.parquet [CONDITION ...].

    In Python, maxhydra.runs.frame("outputs", "status=finished") returns the same table to pandas.

    maxhydra runs export runs.csv sweep=lr
    """
    if args.file.suffix not in WRITERS:
        raise ConfigError(Problem("FILE", "unknown file extension", str(args.file), ", ".join(WRITERS)))
    if not args.file.absolute().parent.is_dir():
        raise ConfigError(Problem("FILE", "its folder does not exist", str(args.file)))
    registry = Registry(args.outputs)
    runs = select_runs(registry, args.conditions)
    columns = run_table(registry, runs)
    WRITERS[args.file.suffix](columns, args.file)
    say(f"{args.file}: {len(runs)} runs, {len(columns)} columns")
    print_warnings(registry)
    return 0


def declare_gc(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument("--status", default="", metavar="S,S", help="only runs with this status: failed,lost")
    parser.add_argument("--older", metavar="TIME", help="only runs not modified for this time: 30m, 12h, 7d, 2w")
    parser.add_argument("--keep-best", type=int, metavar="N", help="keep the best N runs of each sweep")
    parser.add_argument("-m", "--metric", help="metric for --keep-best; default: the runs' objective")
    add_direction(parser)
    parser.add_argument(
        "--checkpoints", action="store_true", help="delete only checkpoints; keep config, metrics and logs"
    )
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask for confirmation")


def run_gc(args: argparse.Namespace) -> int:
    """Delete runs, or only their checkpoints, after confirmation: gc [CONDITION ...] [--status S,S] [--older 7d] ...

    A run is deleted if it matches every condition and every rule. Running runs are never deleted.

    maxhydra runs gc --status failed,lost --older 7d
    maxhydra runs gc sweep=lr --keep-best 3 --checkpoints
    """
    rules = _rules(args)
    registry = Registry(args.outputs)
    runs = find_disposable(registry, select_runs(registry, args.conditions), rules)
    folders = {run.id: registry.root / run.path for run in runs}
    if args.checkpoints:
        runs = [run for run in runs if (folders[run.id] / "checkpoints").is_dir()]
    if not runs:
        say("no runs to delete")
        return 0
    parts = [folders[run.id] / "checkpoints" if args.checkpoints else folders[run.id] for run in runs]
    sizes = dict(zip(runs, map(folder_size, parts), strict=True))
    print_runs(registry, runs, [])
    if not args.yes and not _confirmed(_summary(sizes, args)):
        say("nothing was deleted")
        return 1
    for run in runs:
        directory = RunDirectory(folders[run.id])
        try:
            if args.checkpoints:
                directory.remove_checkpoints()
            else:
                directory.remove()
        except (RunInUseError, OSError) as error:
            say(f"maxhydra: {run.path} was not deleted: {error}", file=sys.stderr)
            del sizes[run]
    say(f"deleted: {_summary(sizes, args)}")
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
    return Rules(statuses, older, args.keep_best, args.metric, args.largest)


def _confirmed(summary: str) -> bool:
    if not sys.stdin.isatty():
        raise ConfigError(Problem("runs gc", "needs confirmation, but stdin is not a terminal", hint="pass --yes"))
    return input(f"delete {summary}? [y/N] ").strip().lower() in ("y", "yes")
