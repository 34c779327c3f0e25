"""Write an HTML report of a sweep or of one run: report [SWEEP|FOLDER|RUN] [--metric NAME] [--max] [--to FILE].

Parallel coordinates, curves, importance of the settings, the best runs with the commands to run them again, and the
differences between their configs. The page is self-contained.

maxhydra runs report lr
maxhydra runs report . --metric eval/loss:min --to all.html
"""

import argparse
from pathlib import Path

from maxhydra.cli.runs._common import print_warnings
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report
from maxhydra.runs.sweep import write_sweep_report


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=".", metavar="SWEEP", help="a folder of runs; default: all runs")
    parser.add_argument("-m", "--metric", help="metric that ranks the runs; default: their objective")
    parser.add_argument("--max", action="store_true", help="larger is better")
    parser.add_argument("--to", type=Path, metavar="FILE", help="output file; default: sweep.html in the folder")


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    folder, runs = registry.runs_under(args.name)
    if not runs:
        raise ConfigError(Problem("runs report", f"no runs in {args.outputs}"))
    if runs[0].path == folder:
        print(write_report(registry.directory(runs[0])))
        return 0
    path = args.to or registry.root / folder / "sweep.html"
    title = folder or registry.root.resolve().name
    print(write_sweep_report(registry, runs, path, title=title, metric=args.metric, largest=args.max))
    print_warnings(registry)
    return 0
