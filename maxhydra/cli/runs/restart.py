"""Verbs that start and stop a run: rerun from step 0, resume from the last checkpoint, and stop."""

import argparse
import sys

from maxhydra.cli.runs._common import runs_command, say, start
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.actions import read_config, resume_arguments, stop_run
from maxhydra.runs.registry import Registry
from maxhydra.runs.rerun import describe_code_change, rerun_arguments


def declare_rerun(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides to change or add")
    parser.add_argument("--anyway", action="store_true", help="run even if the code has changed")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")


def run_rerun(args: argparse.Namespace) -> int:
    """Run again from step 0 in a new folder: rerun RUN [key=value ...] [--anyway].

    Uses the overrides of the run, in the folder where it was started, plus the given changes. The code must be the same
    as in the original run unless --anyway is given. `run.name=NAME` names the new run.

    maxhydra runs rerun lr/3
    maxhydra runs rerun lr/3 run.seed=1 --anyway
    """
    registry = Registry(args.outputs)
    directory = registry.directory(registry.find(args.name))
    facts = directory.read()
    difference = describe_code_change(facts, directory.path)
    if difference and not args.anyway:
        raise ConfigError(
            Problem(args.name, f"the code has changed: {difference}", hint="run the current code with --anyway")
        )
    arguments = rerun_arguments(facts, None, *args.changes, config=read_config(directory))
    return start(arguments, facts["folder"], dry=args.dry_run)


def declare_resume(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("changes", nargs="*", metavar="key=value", help="overrides to change or add")
    parser.add_argument("--dry-run", action="store_true", help="only print the command")


def run_resume(args: argparse.Namespace) -> int:
    """Resume a run from its last checkpoint: resume RUN [key=value ...].

    maxhydra runs resume lr/3
    maxhydra runs resume first train.steps=600
    """
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    if found.status == "running":
        raise ConfigError(
            Problem(args.name, f"is still running on {found.host}", hint=runs_command(args, "tail", found.path, "-f"))
        )
    directory = registry.directory(found)
    facts = directory.read()
    if difference := describe_code_change(facts, directory.path):
        # Only a warning: a run is often resumed after a bug fix, and run.json records the commit of each session.
        say(f"maxhydra: the code has changed: {difference}", file=sys.stderr)
    arguments, folder = resume_arguments(registry, found, args.changes)
    return start(arguments, folder, dry=args.dry_run)


def declare_stop(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", nargs="+", metavar="RUN")


def run_stop(args: argparse.Namespace) -> int:
    """Ask runs of this machine to save a checkpoint and exit: stop RUN ...

    Sends SIGTERM; `maxhydra runs resume` continues from the checkpoint. `maxhydra sweep cancel` stops a whole sweep.

    maxhydra runs stop first
    """
    registry = Registry(args.outputs)
    for run in [registry.find(name) for name in args.names]:
        say(stop_run(registry, run))
    return 0
