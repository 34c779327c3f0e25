"""Compare the config, code and results of two or more runs: diff RUN RUN ... [--json].

maxhydra runs diff lr/0 lr/1
"""

import argparse
import dataclasses
from collections.abc import Sequence

from maxhydra.cli.runs._common import add_json, print_json, print_table
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.compare import Difference, compare
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.summary import format_cell


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN", help="two or more")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    every = registry.runs()
    runs = list(dict.fromkeys(registry.find(name, every) for name in args.names))
    if len(runs) < 2:
        raise ConfigError(Problem("runs diff", "needs two different runs", value=" ".join(args.names)))
    comparison = compare(registry, runs)
    if args.json:
        parts = {
            part.name: getattr(comparison, part.name) for part in dataclasses.fields(comparison) if part.name != "runs"
        }
        named = {part: {entry.name: entry.values for entry in entries} for part, entries in parts.items()}
        print_json({"runs": [run.path for run in runs], **named})
        return 0
    _print("config", runs, comparison.config)
    _print("metrics", runs, comparison.metrics)
    _print("code and machine", runs, comparison.surroundings)
    return 0


def _print(title: str, runs: Sequence[Run], entries: Sequence[Difference]) -> None:
    if not entries:
        print(f"{title}: no difference\n")
        return
    print_table([title, *(run.path for run in runs)], [[e.name, *map(format_cell, e.values)] for e in entries])
    print()
