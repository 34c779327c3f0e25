"""Values of a config that are paths or regular expressions: glob patterns, hints about wrong paths, validation."""

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from maxhydra.config.errors import Problem

# Name of a repository on the Hugging Face hub: ORG/NAME.
HUB_NAME = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"
ACCEPTED = "a file, a folder, a glob pattern or an fsspec URL; several separated by ;"


def parts(names: str) -> list[str]:
    """Split a text of names separated by `;`."""
    return [part for part in (name.strip() for name in names.split(";")) if part]


def matches(name: str) -> list[Path]:
    """Return the files that a local name or glob pattern matches, sorted."""
    root = Path(name).expanduser()
    if root.exists():
        return [root]
    if not any(mark in name for mark in "*?["):
        return []
    anchor = Path(root.anchor or ".")
    pattern = str(root.relative_to(root.anchor)) if root.anchor else str(root)
    return sorted(anchor.glob(pattern))


def nearby_files(path: Path) -> str:
    """Return a hint that lists the nearest existing folder of a path."""
    parent = path if path.is_dir() else next((folder for folder in path.parents if folder.is_dir()), Path("."))
    names = sorted(entry.name for entry in parent.iterdir())
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return f"{parent.resolve()} contains {', '.join(names[:8]) or 'nothing'}{more}"


def matches_any(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns occurs in a name."""
    return any(re.search(pattern, name) for pattern in patterns)


def regex_problems(field: str, patterns: list[str]) -> Iterator[Problem]:
    """Yield a problem for every pattern that is not a valid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(field, f"{pattern!r} is not a regular expression: {error}", value=patterns)
