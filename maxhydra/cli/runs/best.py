"""Show the best runs and how to run the first again: best [CONDITION ...] [--metric NAME] [--max] [--json].

maxhydra runs best sweep=lr
maxhydra runs best model=tiny --metric tokens_per_second --max -n 3
"""

import argparse

from maxhydra.cli.runs._listing import add_conditions, add_json, as_facts, print_json, print_runs, tell_faults
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.compare import differing
from maxhydra.runs.query import best, select
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import rerun_command

# More columns than these do not fit a terminal.
_COLUMNS = 4


def declare(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument("-m", "--metric", help="by its last value, or NAME:min, NAME:max; the runs' objective without")
    parser.add_argument("--max", action="store_true", help="larger is better; smaller is without")
    parser.add_argument("-n", "--limit", type=int, default=5, help="so many at most")
    add_json(parser)


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    metric, ranked = best(registry, select(registry, asked.conditions), asked.metric, largest=asked.max)
    if not ranked:
        raise ConfigError(Problem(metric, "no run that meets the conditions has a value of it yet"))
    shown = ranked[: max(1, asked.limit)]
    values = registry.values(metric, shown)
    commands = {run.id: rerun_command(registry.directory(run).read()) for run in shown}
    if asked.json:
        print_json([as_facts(run, **{metric: values[run.id], "rerun": commands[run.id]}) for run in shown])
    else:
        settings = registry.settings(run.id for run in shown)
        varied = [key for key in differing(list(settings.values())) if not key.startswith("run.")]
        print_runs(registry, shown, [metric, *varied[:_COLUMNS]])
        print(f"\nagain: {commands[shown[0].id]}")
    tell_faults(registry)
    return 0
