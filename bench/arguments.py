"""Separates a script's own name=value arguments from Hydra overrides, which have the same form."""

from collections.abc import Container


def split_arguments(arguments: list[str], names: Container[str]) -> tuple[dict[str, str], list[str]]:
    """The script's own arguments by name, and the overrides."""
    own = dict(part.split("=", 1) for part in arguments if part.partition("=")[0] in names)
    return own, [part for part in arguments if part.partition("=")[0] not in names]
