"""Format versions of the files that maxhydra writes, and the migration of older ones when they are read.

run.json, sweep.json and a checkpoint's manifest.json carry `format`, an integer that grows when a reader of an earlier
version would misread the file, and `maxhydra`, the version that wrote it. Files without `format` have format 1: they
were written before the field existed. Files are migrated in memory and never rewritten.
"""

from collections.abc import Callable, Mapping
from typing import Any

import maxhydra

Values = dict[str, Any]


class NewerFormatError(ValueError):
    """A file was written by a later version of maxhydra; the message names the format and what to install."""


def stamp(current: int) -> Values:
    """The entries that a file of format `current` carries."""
    return {"format": current, "maxhydra": maxhydra.__version__}


def migrate_format(
    values: Mapping[str, Any], *, current: int, migrations: Mapping[int, Callable[[Values], Values]]
) -> Values:
    """Bring a file's values to the `current` format: `migrations[n]` converts format n to n + 1.

    Raises NewerFormatError for a format above `current`, and ValueError if `format` is not a positive integer.
    """
    found = values.get("format", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"format={found!r} is not a positive integer")
    if found > current:
        writer = values.get("maxhydra", "a later version")
        raise NewerFormatError(
            f"has format {found}, written by maxhydra {writer}; maxhydra {maxhydra.__version__} reads formats up to "
            f"{current}: install maxhydra {writer} or later"
        )
    migrated = dict(values)
    for version in range(found, current):
        migrated = migrations[version](migrated) if version in migrations else migrated
    return migrated
