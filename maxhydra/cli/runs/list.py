"""Show the runs: list [CONDITION ...] [--sort KEY] [--columns KEY,KEY] [--json].

maxhydra runs list
maxhydra runs list status=finished optimizer.learning_rate=1e-3 --sort eval/loss
maxhydra runs list sweep=lr 'eval/loss<2' --columns optimizer.learning_rate,run.seed --json
"""

import argparse

from maxhydra.cli.runs._listing import add_conditions, add_json, as_facts, print_json, print_runs, tell_faults
from maxhydra.runs.query import order, parse, select
from maxhydra.runs.registry import FIELDS, Registry

# A screen; programs get all.
_LIMIT = 40


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument("-s", "--sort", default="", metavar="KEY", help="a field, setting or metric; newest first else")
    parser.add_argument("-r", "--reverse", action="store_true", help="largest first")
    parser.add_argument("-c", "--columns", default="", metavar="KEY,KEY", help="settings and metrics to show besides")
    parser.add_argument("-n", "--limit", type=int, help=f"so many at most; {_LIMIT} unless --json, 0 for all")
    add_json(parser)


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    runs = select(registry, asked.conditions)
    if asked.sort:
        runs = order(registry, runs, asked.sort, descending=asked.reverse)
    elif asked.reverse:
        runs.reverse()
    # What is asked about is shown.
    asked_for = list(filter(None, asked.columns.split(",")))
    about = [asked.sort, *(parse(text).key for text in asked.conditions)]
    columns = list(dict.fromkeys([*asked_for, *(name for name in about if name and name not in FIELDS)]))
    limit = asked.limit if asked.limit is not None else 0 if asked.json else _LIMIT
    shown = runs[: limit or len(runs)]
    if asked.json:
        values = {name: registry.values(name, shown) for name in columns}
        print_json([as_facts(run, **{name: values[name].get(run.id) for name in columns}) for run in shown])
    elif not runs:
        print("no runs" if not asked.conditions else "no run meets these conditions")
    else:
        print_runs(registry, shown, columns)
        if len(shown) < len(runs):
            print(f"{len(shown)} of {len(runs)} runs; -n 0 shows all")
    tell_faults(registry)
    return 0
