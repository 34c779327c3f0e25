"""Run it again, from the start, in a new folder: rerun RUN [key=value ...] [--anyway].

The overrides of the run are used again, in the folder where it was started, with any changes that are given. The code
must be the one that the run had; --anyway goes on with other code. `run.name=NAME` names the new run.

maxhydra runs rerun lr/3
maxhydra runs rerun lr/3 run.seed=1 --anyway
"""

import argparse

from maxhydra.cli.runs._starting import start
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import arguments, changed_code


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="what is to be different")
    parser.add_argument("--anyway", action="store_true", help="also with other code than the run had")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    directory = registry.directory(registry.find(asked.name))
    facts = directory.read()
    difference = changed_code(facts, directory.path)
    if difference and not asked.anyway:
        raise ConfigError(
            Problem(asked.name, f"the code is another: {difference}", hint="--anyway runs it with this code")
        )
    return start(arguments(facts, None, *asked.changes), facts["folder"], dry=asked.dry_run)
