"""Show one run: status, results, and the config values that differ from the defaults: show [RUN] [--json].

maxhydra runs show            # the newest
maxhydra runs show lr/3 --json
"""

import argparse
import shlex

from maxhydra.cli.runs._common import add_json, print_json
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import scan_metrics
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.settings import get_setting, list_settings
from maxhydra.runs.summary import Facts, format_time, key_numbers

_WIDTH = 14


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", metavar="RUN")
    parser.add_argument("--all", action="store_true", help="show the whole config")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    runs = registry.runs()
    if not runs:
        raise ConfigError(Problem("runs show", f"no runs in {args.outputs}"))
    found = registry.find(args.name, runs) if args.name else runs[0]
    directory = registry.directory(found)
    facts = directory.read()
    if args.json:
        config, metrics = registry.settings([found.id])[found.id], registry.metrics([found.id])[found.id]
        print_json({**facts, "path": found.path, "config": config, "metrics": metrics})
        return 0
    config_yaml = directory.config_path.read_text(encoding="utf-8") if directory.config_path.exists() else ""
    _print_facts(found, facts)
    for figure in key_numbers(
        facts, scan_metrics(directory.metrics_path).rows, total_steps=get_setting(config_yaml, "train.steps")
    ):
        _line(figure.label.lower(), f"{figure.value}{f'  ({figure.note})' if figure.note else ''}")
    print("\nconfig" if args.all else "\nconfig values that are not the default (--all shows the rest)")
    for setting in list_settings(config_yaml):
        if args.all or setting.changed:
            print(f"  {setting.path} = {setting.value}")
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
        print(f"{label:<{_WIDTH}}{text}")
