"""Write the runs as a table, a row each: export FILE.csv|FILE.parquet [CONDITION ...].

In Python, maxhydra.runs.frame("outputs", "status=finished") gives the same to pandas.

maxhydra runs export runs.csv sweep=lr
"""

import argparse
from pathlib import Path

from maxhydra.cli.runs._listing import add_conditions, tell_faults
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.export import WRITERS, table
from maxhydra.runs.query import select
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="its ending says the format: .csv or .parquet")
    add_conditions(parser)


def run(asked: argparse.Namespace) -> int:
    if asked.file.suffix not in WRITERS:
        raise ConfigError(Problem("FILE", "has no known ending", str(asked.file), ", ".join(WRITERS)))
    if not asked.file.absolute().parent.is_dir():
        raise ConfigError(Problem("FILE", "its folder is not there", str(asked.file)))
    registry = Registry(asked.outputs)
    runs = select(registry, asked.conditions)
    columns = table(registry, runs)
    WRITERS[asked.file.suffix](columns, asked.file)
    print(f"{asked.file}: {len(runs)} runs, {len(columns)} columns")
    tell_faults(registry)
    return 0
