"""Show the best runs and the command of the first: best [CONDITION ...] [--metric NAME] [--max] [--json].

maxhydra runs best sweep=lr
maxhydra runs best model=tiny --metric tokens_per_second --max -n 3
"""

import argparse

from maxhydra.cli.runs._common import add_conditions, add_json, as_facts, print_json, print_runs, print_warnings
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.compare import differing_keys
from maxhydra.runs.query import rank_runs, select_runs
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import rerun_command

# Changed settings that are shown; more do not fit a terminal.
_MAX_COLUMNS = 4


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument(
        "-m", "--metric", help="rank by its last value, or NAME:min, NAME:max; default: the runs' objective"
    )
    parser.add_argument("--max", action="store_true", help="larger is better (default: smaller)")
    parser.add_argument("-n", "--limit", type=int, default=5, help="maximum number of runs")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    metric, ranked = rank_runs(registry, select_runs(registry, args.conditions), args.metric, largest=args.max)
    if not ranked:
        raise ConfigError(Problem(metric, "no matching run has a value of this metric yet"))
    shown = ranked[: max(1, args.limit)]
    values = registry.values(metric, shown)
    commands = {run.id: rerun_command(registry.directory(run).read()) for run in shown}
    if args.json:
        print_json([as_facts(run, **{metric: values[run.id], "rerun": commands[run.id]}) for run in shown])
    else:
        settings = registry.settings(run.id for run in shown)
        changed = [key for key in differing_keys(list(settings.values())) if not key.startswith("run.")]
        print_runs(registry, shown, [metric, *changed[:_MAX_COLUMNS]])
        print(f"\nagain: {commands[shown[0].id]}")
    print_warnings(registry)
    return 0
