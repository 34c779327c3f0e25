"""Add tags to a run or remove them, even while it is running: tag RUN TAG ... [-r TAG ...].

maxhydra runs tag lr/3 keep paper
maxhydra runs tag lr/3 -r paper
"""

import argparse

from maxhydra.cli.runs._common import label
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("tags", nargs="*", metavar="TAG", help="tags to add")
    parser.add_argument("-r", "--remove", nargs="+", default=[], metavar="TAG", help="tags to remove")


def run(args: argparse.Namespace) -> int:
    bad = [tag for tag in (*args.tags, *args.remove) if not tag.strip() or "," in tag]
    if bad:
        raise ConfigError(Problem("tag", "is empty or contains a comma", value=bad[0]))
    registry = Registry(args.outputs)
    found = registry.find(args.name)
    directory = registry.directory(found)
    missing = [tag for tag in args.remove if tag not in found.tags]
    if missing:
        accepted = ", ".join(found.tags) or "the run has none"
        raise ConfigError([Problem("--remove", "the run has no such tag", tag, accepted) for tag in missing])
    if args.tags or args.remove:
        label(directory, add=args.tags, remove=args.remove)
    print(f"{found.path}: {' '.join(directory.read()['tags']) or 'no tags'}")
    return 0
