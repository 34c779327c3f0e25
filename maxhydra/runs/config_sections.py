"""config.yaml in pieces: its top-level sections, most of which are the same text in thousands of runs."""

import functools
import re
from typing import Any

import yaml

from maxhydra.config.migrations import migrate_config
from maxhydra.record.atomic_io import to_json
from maxhydra.runs.settings import leaves

# libyaml, where PyYAML was built with it, is ten times faster.
_LOADER: type[yaml.CSafeLoader] | type[yaml.SafeLoader] = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
# A line at the margin starts a section, one with two spaces a part of it; the dash of a list starts neither.
_SECTION = re.compile(r"^(?=[^\s-])", re.MULTILINE)
_PART = re.compile(r"^(?=  [^\s-])", re.MULTILINE)
_HEAD = re.compile(r"([\w.]+):\n")

Cell = str | int | float
Leaves = tuple[tuple[str, Cell], ...]


def read(config_yaml: str) -> list[tuple[str, Cell]]:
    """Dotted key and value of every leaf. Raises yaml.YAMLError."""
    return [leaf for section in _SECTION.split(config_yaml) if section.strip() for leaf in _read_section(section)]


@functools.lru_cache(maxsize=4096)
def _read_section(section: str) -> Leaves:
    """Of a section that is new, most parts are known: they are read one by one."""
    head, *parts = _PART.split(section)
    name = _HEAD.fullmatch(head)
    if name is None or not parts:
        # An empty section has no key of its own; its name alone is that of a group, whose value is the chosen option.
        return tuple(leaf for leaf in _read_part("", section) if leaf[1] != "{}" or "." in leaf[0])
    return tuple(leaf for part in parts for leaf in _read_part(f"{name[1]}.", part))


@functools.lru_cache(maxsize=16384)
def _read_part(prefix: str, text: str) -> Leaves:
    content = yaml.load(text, Loader=_LOADER)
    if not isinstance(content, dict):
        raise yaml.YAMLError("is not a mapping")
    values = migrate_config({prefix + path: value for path, value in leaves(content)})
    return tuple((path, cell(value)) for path, value in values.items())


def cell(value: Any) -> Cell:
    """A value as the index keeps it: numbers compare as numbers, all else as one would write it on the command line."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value)
    # NaN is not equal to itself, and SQLite would take it for NULL.
    if isinstance(value, float) and value != value:
        return "NaN"
    return value if isinstance(value, (int, float, str)) else to_json(value)
