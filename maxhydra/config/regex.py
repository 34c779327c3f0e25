"""Regular expressions that select parameters or projections by name."""

import re
from collections.abc import Iterable, Iterator

from maxhydra.config.errors import Problem


def matches(patterns: Iterable[str], name: str) -> bool:
    """Return whether one of the patterns occurs in a name."""
    return any(re.search(pattern, name) for pattern in patterns)


def regex_problems(field: str, patterns: list[str]) -> Iterator[Problem]:
    """Yield a problem for every pattern that is not a valid regular expression."""
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            yield Problem(field, f"{pattern!r} is not a regular expression: {error}", value=patterns)
