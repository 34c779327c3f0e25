"""Go on with a run from its last checkpoint: resume RUN [key=value ...].

maxhydra runs resume lr/3
maxhydra runs resume first train.steps=600
"""

import argparse
import os
import sys

from maxhydra.cli.runs._starting import start
from maxhydra.config.errors import ConfigError, Problem, quoted
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import arguments, changed_code


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="what is to be different")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    found = registry.find(asked.name)
    if found.status == "running":
        raise ConfigError(
            Problem(asked.name, f"is running, on {found.host}", hint=f"maxhydra runs tail {found.path} -f")
        )
    directory = registry.directory(found)
    facts = directory.read()
    if difference := changed_code(facts, directory.path):
        # The usual reason to go on with a run is that something was mended; run.json keeps the commit of each session.
        print(f"maxhydra: the code is another: {difference}", file=sys.stderr)
    outputs = os.path.relpath(registry.root.resolve(), facts["folder"])
    changes = [*asked.changes, f"run.outputs={quoted(outputs)}"]
    return start(arguments(facts, found.path, *changes), facts["folder"], dry=asked.dry_run)
