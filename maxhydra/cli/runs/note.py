"""Write a note on a run, or show it: note RUN [TEXT]; also of a run that is under way.

maxhydra runs note lr/3 "the baseline of figure 2"
"""

import argparse

from maxhydra.cli.runs._listing import label
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("text", nargs="?", help="in place of the note that is there; '' for none")


def run(asked: argparse.Namespace) -> int:
    registry = Registry(asked.outputs)
    found = registry.find(asked.name)
    directory = registry.directory(found)
    if asked.text is not None:
        label(directory, note=asked.text)
    print(f"{found.path}: {directory.read()['notes'] or 'no note'}")
    return 0
