"""Give runs tags, or take tags away: tag RUN TAG ... [-r TAG ...]; also of a run that is under way.

maxhydra runs tag lr/3 keep paper
maxhydra runs tag lr/3 -r paper
"""

import argparse

from maxhydra.cli.runs._listing import label
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.runs.registry import Registry


def declare(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="RUN")
    parser.add_argument("tags", nargs="*", metavar="TAG", help="to add")
    parser.add_argument("-r", "--remove", nargs="+", default=[], metavar="TAG", help="to take away")


def run(asked: argparse.Namespace) -> int:
    bad = [tag for tag in (*asked.tags, *asked.remove) if not tag.strip() or "," in tag]
    if bad:
        raise ConfigError(Problem("tag", "is empty or holds a comma", value=bad[0]))
    registry = Registry(asked.outputs)
    found = registry.find(asked.name)
    directory = registry.directory(found)
    missing = [tag for tag in asked.remove if tag not in found.tags]
    if missing:
        accepted = ", ".join(found.tags) or "the run has none"
        raise ConfigError([Problem("--remove", "the run has no such tag", tag, accepted) for tag in missing])
    if asked.tags or asked.remove:
        label(directory, add=asked.tags, remove=asked.remove)
    print(f"{found.path}: {' '.join(directory.read()['tags']) or 'no tags'}")
    return 0
