"""List runs: list [CONDITION ...] [--sort KEY] [--columns KEY,KEY] [--json].

maxhydra runs list
maxhydra runs list status=finished optimizer.learning_rate=1e-3 --sort eval/loss
maxhydra runs list sweep=lr 'eval/loss<2' --columns optimizer.learning_rate,run.seed --json
"""

import argparse

from maxhydra.cli.runs._common import add_conditions, add_json, as_facts, print_json, print_runs, print_warnings
from maxhydra.runs.query import parse_condition, select_runs, sort_runs
from maxhydra.runs.registry import FIELDS, Registry

# Rows that fit a screen; --json prints all.
_LIMIT = 40


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument(
        "-s", "--sort", default="", metavar="KEY", help="a field, setting or metric; default: newest first"
    )
    parser.add_argument("-r", "--reverse", action="store_true", help="largest first")
    parser.add_argument("-c", "--columns", default="", metavar="KEY,KEY", help="additional settings and metrics")
    parser.add_argument(
        "-n", "--limit", type=int, help=f"maximum number of runs; default {_LIMIT}, all with --json; 0 for all"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    runs = select_runs(registry, args.conditions)
    if args.sort:
        runs = sort_runs(registry, runs, args.sort, descending=args.reverse)
    elif args.reverse:
        runs.reverse()
    # Keys of conditions and of --sort are shown too.
    requested = list(filter(None, args.columns.split(",")))
    queried = [args.sort, *(parse_condition(text).key for text in args.conditions)]
    columns = list(dict.fromkeys([*requested, *(name for name in queried if name and name not in FIELDS)]))
    limit = args.limit if args.limit is not None else 0 if args.json else _LIMIT
    shown = runs[: limit or len(runs)]
    if args.json:
        values = {name: registry.values(name, shown) for name in columns}
        print_json([as_facts(run, **{name: values[name].get(run.id) for name in columns}) for run in shown])
    elif not runs:
        print("no runs" if not args.conditions else "no run matches these conditions")
    else:
        print_runs(registry, shown, columns)
        if len(shown) < len(runs):
            print(f"{len(shown)} of {len(runs)} runs; -n 0 shows all")
    print_warnings(registry)
    return 0
