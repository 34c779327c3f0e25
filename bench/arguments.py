"""Arguments of a script among overrides of the command line, both written name=value."""

from collections.abc import Container


def split_own(arguments: list[str], names: Container[str]) -> tuple[dict[str, str], list[str]]:
    """Those of the script by name, and overrides."""
    own = dict(part.split("=", 1) for part in arguments if part.partition("=")[0] in names)
    return own, [part for part in arguments if part.partition("=")[0] not in names]
