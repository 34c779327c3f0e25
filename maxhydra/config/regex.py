"""Regular expressions by which a config chooses among names: parameters, projections."""

import re
from collections.abc import Iterable, Iterator

from maxhydra.config.errors import Problem


def matches(patterns: Iterable[str], name: str) -> bool:
    """Whether one of them is found in a name."""
    return any(re.search(pattern, name) for pattern in patterns)


def unreadable(field: str, patterns: list[str]) -> Iterator[Problem]:
    """Those that are no regular expressions."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(field, f"{pattern!r} is not a regular expression: {error}", value=patterns)
