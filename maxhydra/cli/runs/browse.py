"""Verbs that read the registry: list, show, best and diff."""

import argparse
import dataclasses
import shlex
from collections.abc import Sequence

from maxhydra.cli.runs._common import (
    add_conditions,
    add_direction,
    add_json,
    as_facts,
    print_json,
    print_runs,
    print_table,
    print_warnings,
    say,
)
from maxhydra.config.errors import UNSET, ConfigError, Problem
from maxhydra.record import scan_metrics
from maxhydra.runs.compare import Difference, compare, differing_keys
from maxhydra.runs.query import parse_condition, rank_runs, select_runs, sort_runs
from maxhydra.runs.registry import FIELDS, Registry, Run
from maxhydra.runs.rerun import rerun_command
from maxhydra.runs.seeds import SeedGroup, group_by_seed
from maxhydra.runs.settings import chosen_options, get_setting, list_settings, read_config_text
from maxhydra.runs.summary import Facts, format_cell, format_time, key_numbers

# Rows that fit a screen; --json prints all.
_LIMIT = 40


def declare_list(parser: argparse.ArgumentParser) -> None:
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


def run_list(args: argparse.Namespace) -> int:
    """List runs: list [CONDITION ...] [--sort KEY] [--columns KEY,KEY] [--json].

    maxhydra runs list
    maxhydra runs list status=finished optimizer.learning_rate=1e-3 --sort eval/loss
    maxhydra runs list sweep=lr 'eval/loss<2' --columns optimizer.learning_rate,run.seed --json
    """
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
        say("no runs" if not args.conditions else "no run matches these conditions")
    else:
        print_runs(registry, shown, columns)
        if len(shown) < len(runs):
            say(f"{len(shown)} of {len(runs)} runs; -n 0 shows all")
    print_warnings(registry)
    return 0


_WIDTH = 14


def declare_show(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("--all", action="store_true", help="show the whole config")
    add_json(parser)


def run_show(args: argparse.Namespace) -> int:
    """Show one run: status, results, the chosen options and the values that its command set: show [RUN] [--json].

    maxhydra runs show            # the newest
    maxhydra runs show lr/3 --json
    """
    registry = Registry(args.outputs)
    runs = registry.runs()
    if not runs:
        raise ConfigError(Problem("runs show", f"no runs in {args.outputs}"))
    found = registry.find(args.name, runs) if args.name else runs[0]
    directory = registry.directory(found)
    facts = registry.facts(found)
    if args.json:
        config, metrics = registry.settings([found.id])[found.id], registry.metrics([found.id])[found.id]
        print_json({**facts, "path": found.path, "config": config, "metrics": metrics})
        return 0
    config_yaml = read_config_text(directory.config_path)
    _print_facts(found, facts)
    for figure in key_numbers(
        facts, scan_metrics(directory.metrics_path).rows, total_steps=get_setting(config_yaml, "train.steps")
    ):
        _line(figure.label.lower(), f"{figure.value}{f'  ({figure.note})' if figure.note else ''}")
    say("\noptions" if (options := chosen_options(facts)) else "\nno options chosen")
    for group, option in options.items():
        say(f"  {group} = {option}")
    say("\nconfig" if args.all else "\nconfig values set by the command (--all shows the rest)")
    for setting in list_settings(config_yaml, facts):
        if args.all or setting.changed:
            say(f"  {setting.path} = {setting.value}")
    return 0


def _print_facts(run: Run, facts: Facts) -> None:
    git = facts.get("git") or {}
    commit = f"{git['sha'][:12]}{' with uncommitted changes' if git.get('dirty') else ''}" if git.get("sha") else ""
    _line("run", run.path)
    _line("status", f"{facts['status']}{': ' + facts['reason'] if facts['reason'] else ''}")
    _line("started", f"{format_time(facts['created'])}, {len(facts['sessions'])} session(s), on {facts['host']}")
    _line("command", shlex.join(facts.get("command") or []))
    _line("commit", commit)
    _line("devices", str(facts.get("devices") or ""))
    _line("tags", " ".join(facts["tags"]))
    _line("note", facts["notes"] or "")


def _line(label: str, text: str) -> None:
    if text:
        say(f"{label:<{_WIDTH}}{text}")


# Changed settings that are shown; more do not fit a terminal.
_MAX_COLUMNS = 4


def declare_best(parser: argparse.ArgumentParser) -> None:
    add_conditions(parser)
    parser.add_argument(
        "-m", "--metric", help="rank by its last value, or NAME:min, NAME:max; default: the runs' objective"
    )
    add_direction(parser)
    parser.add_argument("-n", "--limit", type=int, default=5, help="maximum number of runs")
    parser.add_argument(
        "--seeds", action="store_true", help="average runs that differ in seeds, with the 95% confidence interval"
    )
    add_json(parser)


def run_best(args: argparse.Namespace) -> int:
    """Show the best runs and the command of the first: best [CONDITION ...] [--metric NAME] [--seeds] [--json].

    maxhydra runs best sweep=lr
    maxhydra runs best sweep=lr --seeds          # mean ± interval of runs that differ only in seeds
    maxhydra runs best model=tiny --metric tokens_per_second -n 3
    """
    registry = Registry(args.outputs)
    selected = select_runs(registry, args.conditions)
    if not selected:
        reason = "no run matches these conditions" if args.conditions else f"no runs in {args.outputs}"
        raise ConfigError(Problem("runs best", reason, " ".join(args.conditions) if args.conditions else UNSET))
    metric, ranked, largest = rank_runs(registry, selected, args.metric, largest=args.largest)
    if not ranked:
        raise ConfigError(Problem(metric, "no matching run has a value of this metric yet"))
    if args.seeds:
        print_seed_groups(registry, ranked, metric, largest=largest, limit=max(1, args.limit), as_json=args.json)
        return 0
    shown = ranked[: max(1, args.limit)]
    values = registry.values(metric, shown)
    commands = {run.id: rerun_command(registry.facts(run)) for run in shown}
    if args.json:
        print_json([as_facts(run, **{metric: values[run.id], "rerun": commands[run.id]}) for run in shown])
    else:
        settings = registry.settings(run.id for run in shown)
        changed = [key for key in differing_keys(list(settings.values())) if not key.startswith("run.")]
        print_runs(registry, shown, [metric, *changed[:_MAX_COLUMNS]])
        say(f"\nagain: {commands[shown[0].id]}")
    print_warnings(registry)
    return 0


def print_seed_groups(
    registry: Registry, runs: Sequence[Run], metric: str, *, largest: bool, limit: int | None, as_json: bool
) -> None:
    """Print groups of runs that differ only in seeds, best mean first."""
    groups = sorted(
        group_by_seed(registry, runs, registry.values(metric, runs)), key=lambda group: group.mean, reverse=largest
    )[:limit]
    if as_json:
        keys = ("settings", "mean", "margin")
        print_json([{**{key: getattr(group, key) for key in keys}, "runs": _paths(group)} for group in groups])
        return
    columns = list(groups[0].settings)[:_MAX_COLUMNS]
    rows = [
        [*(format_cell(group.settings[key]) for key in columns), group.value, str(len(group.runs)), _paths(group)[0]]
        for group in groups
    ]
    print_table([*columns, metric, "seeds", "best run"], rows)
    say(f"\nagain: {rerun_command(registry.facts(groups[0].runs[0]))}")
    print_warnings(registry)


def _paths(group: SeedGroup) -> list[str]:
    return [run.path for run in group.runs]


def declare_diff(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN", help="two or more")
    add_json(parser)


def run_diff(args: argparse.Namespace) -> int:
    """Compare the config, code and results of two or more runs: diff RUN RUN ... [--json].

    maxhydra runs diff lr/0 lr/1
    """
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
    _print_differences("config", runs, comparison.config)
    _print_differences("metrics", runs, comparison.metrics)
    _print_differences("code and machine", runs, comparison.surroundings)
    return 0


def _print_differences(title: str, runs: Sequence[Run], entries: Sequence[Difference]) -> None:
    if not entries:
        say(f"{title}: no difference\n")
        return
    print_table([title, *(run.path for run in runs)], [[e.name, *map(format_cell, e.values)] for e in entries])
    say()
