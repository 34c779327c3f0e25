"""Write one HTML page over many runs, or over one: report [SWEEP|FOLDER|RUN] [--metric NAME] [--max] [--to FILE].

Parallel coordinates, curves, importance of the settings, the best runs with the commands to run them again, and how
their configs differ. The page needs nothing but itself.

maxhydra runs report lr
maxhydra runs report . --metric eval/loss:min --to all.html
"""

import argparse
from pathlib import Path

from maxhydra.cli.runs._listing import tell_faults
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry
from maxhydra.runs.report import write_report
from maxhydra.runs.sweep import write_sweep_report


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", default=".", metavar="SWEEP", help="a folder of runs; all of them without")
    parser.add_argument("-m", "--metric", help="by which runs are ranked; their objective without")
    parser.add_argument("--max", action="store_true", help="larger is better")
    parser.add_argument("--to", type=Path, metavar="FILE", help="sweep.html in the folder without")


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    folder, runs = registry.under(asked.name)
    if not runs:
        raise ConfigError(Problem("runs report", f"{asked.outputs} holds no runs"))
    if runs[0].path == folder:
        print(write_report(registry.directory(runs[0])))
        return 0
    path = asked.to or registry.root / folder / "sweep.html"
    title = folder or registry.root.resolve().name
    print(write_sweep_report(registry, runs, path, title=title, metric=asked.metric, largest=asked.max))
    tell_faults(registry)
    return 0
