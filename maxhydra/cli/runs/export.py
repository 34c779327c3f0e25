"""Write runs as a table with one row per run: export FILE.csv|FILE.parquet [CONDITION ...].

In Python, maxhydra.runs.frame("outputs", "status=finished") returns the same table to pandas.

maxhydra runs export runs.csv sweep=lr
"""

import argparse
from pathlib import Path

from maxhydra.cli.runs._common import add_conditions, print_warnings
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.export import WRITERS, run_table
from maxhydra.runs.query import select_runs
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="output file; .csv or .parquet")
    add_conditions(parser)


def run(args: argparse.Namespace) -> int:
    if args.file.suffix not in WRITERS:
        raise ConfigError(Problem("FILE", "unknown file extension", str(args.file), ", ".join(WRITERS)))
    if not args.file.absolute().parent.is_dir():
        raise ConfigError(Problem("FILE", "its folder does not exist", str(args.file)))
    registry = Registry(args.outputs)
    runs = select_runs(registry, args.conditions)
    columns = run_table(registry, runs)
    WRITERS[args.file.suffix](columns, args.file)
    print(f"{args.file}: {len(runs)} runs, {len(columns)} columns")
    print_warnings(registry)
    return 0
