"""Resume a run from its last checkpoint: resume RUN [key=value ...].

maxhydra runs resume lr/3
maxhydra runs resume first train.steps=600
"""

import argparse
import os
import sys

from maxhydra.cli.runs._common import start
from maxhydra.config.errors import ConfigError, Problem, quoted
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import describe_code_change, rerun_arguments


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides to change or add")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    if found.status == "running":
        raise ConfigError(
            Problem(args.name, f"is still running on {found.host}", hint=f"maxhydra runs tail {found.path} -f")
        )
    directory = registry.directory(found)
    facts = directory.read()
    if difference := describe_code_change(facts, directory.path):
        # Only a warning: a run is often resumed after a bug fix, and run.json records the commit of each session.
        print(f"maxhydra: the code has changed: {difference}", file=sys.stderr)
    outputs = os.path.relpath(registry.root.resolve(), facts["folder"])
    changes = [*args.changes, f"run.outputs={quoted(outputs)}"]
    return start(rerun_arguments(facts, found.path, *changes), facts["folder"], dry=args.dry_run)
