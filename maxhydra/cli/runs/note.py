"""Set or show the note of a run, even while it is running: note RUN [TEXT].

maxhydra runs note lr/3 "the baseline of figure 2"
"""

import argparse

from maxhydra.cli.runs._common import label
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("text", nargs="?", help="replaces the current note; '' deletes it")


def run(args: argparse.Namespace) -> int:
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    directory = registry.directory(found)
    if args.text is not None:
        label(directory, note=args.text)
    print(f"{found.path}: {directory.read()['notes'] or 'no note'}")
    return 0
