"""A run's config as a flat list of settings, each marked if the command of the run set it.

config.yaml is parsed section by section with a cache, since most sections are identical in thousands of runs.
"""

import dataclasses
import functools
import re
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config import Config, ConfigError
from maxhydra.config.migrations import migrate_config, migrate_overrides
from maxhydra.config.registry import defaults
from maxhydra.config.yaml_files import FAST_LOADER, check_yaml, may_exceed_limits
from maxhydra.record.atomic_io import to_json, to_plain
from maxhydra.record.redact import redact_value

# Groups whose options follow from others.
_DERIVED_GROUPS = ("recipe",)


@dataclasses.dataclass(frozen=True)
class Setting:
    path: str
    value: str
    changed: bool


def list_settings(config_yaml: str, facts: Mapping[str, Any]) -> list[Setting]:
    """All leaves of config.yaml by dotted path, for display: secrets that earlier versions stored are redacted.

    A setting has changed if an override of the run set it; of a run without overrides, if it is not the schema's
    default.
    """
    config = _load(config_yaml)
    if "overrides" in facts:
        keys = [override.lstrip("+~").partition("=")[0] for override in migrate_overrides(facts["overrides"])]
        given = [key for key in keys if key not in (facts.get("choices") or {})]
        changed = {path for path, _ in leaves(config) if any(f"{path}.".startswith(f"{key}.") for key in given)}
    else:
        defaults = dict(leaves(_defaults(Config, config)))
        changed = {path for path, value in leaves(config) if path not in defaults or defaults[path] != value}
    return [
        Setting(path, redact_value(path, _format(value)), changed=path in changed) for path, value in leaves(config)
    ]


def chosen_options(facts: Mapping[str, Any]) -> dict[str, str]:
    """Options of a run, by group, that are not those of a command without arguments."""
    usual = dict(defaults())
    choices = migrate_config(dict(facts.get("choices") or {}))
    return {
        group: option
        for group, option in choices.items()
        if usual.get(group) != option and group not in _DERIVED_GROUPS
    }


def _defaults(schema: type, config: Any) -> dict[str, Any]:
    """Defaults of the schema; in a mapping of sections (layer kinds), each entry has the section's defaults."""
    hints, defaults = typing.get_type_hints(schema), {}
    config = config if isinstance(config, dict) else {}  # a truncated file ends in a section without keys
    for field in dataclasses.fields(schema):
        value, hint = config.get(field.name), hints[field.name]
        entry_type = (typing.get_args(hint) or (None,))[-1]
        if dataclasses.is_dataclass(hint):
            defaults[field.name] = _defaults(typing.cast(type, hint), value or {})
        elif dataclasses.is_dataclass(entry_type) and isinstance(value, dict):
            entry_schema = typing.cast(type, entry_type)
            defaults[field.name] = {name: _defaults(entry_schema, entry or {}) for name, entry in value.items()}
        elif field.default_factory is not dataclasses.MISSING:
            defaults[field.name] = to_plain(field.default_factory())
        else:
            defaults[field.name] = to_plain(field.default)
    return defaults


def get_setting(config_yaml: str, path: str) -> Any:
    """A single value of config.yaml, or None."""
    return dict(leaves(_load(config_yaml))).get(path)


def read_config_text(path: Path) -> str:
    """Text of config.yaml, with a replacement for bytes that are not UTF-8; empty without the file."""
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""


def _load(config_yaml: str) -> dict[str, Any]:
    """All values of config.yaml under their current names; none if the file is damaged, which the index reports."""
    try:
        check_yaml(config_yaml, "config.yaml")
        content = yaml.load(config_yaml, Loader=FAST_LOADER)
        return migrate_config(content) if isinstance(content, dict) else {}
    except (ConfigError, yaml.YAMLError, ValueError, TypeError, AttributeError):
        return {}


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; an empty mapping is a leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node


def _format(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)


# An unindented line starts a section, a line with two spaces a part of it; list items start neither.
_SECTION = re.compile(r"^(?=[^\s-])", re.MULTILINE)
_PART = re.compile(r"^(?=  [^\s-])", re.MULTILINE)
_HEAD = re.compile(r"([\w.]+):\n")

Cell = str | int | float
Leaves = tuple[tuple[str, Cell], ...]


def read(config_yaml: str) -> list[tuple[str, Cell]]:
    """Dotted key and value of every leaf of config.yaml. Raises yaml.YAMLError, or ConfigError beyond the limits."""
    if may_exceed_limits(config_yaml):
        check_yaml(config_yaml, "config.yaml")
    return [leaf for section in _SECTION.split(config_yaml) if section.strip() for leaf in _read_section(section)]


@functools.lru_cache(maxsize=4096)
def _read_section(section: str) -> Leaves:
    """Parse a section part by part: of a new section, most parts are cached."""
    head, *parts = _PART.split(section)
    name = _HEAD.fullmatch(head)
    if name is None or not parts:
        # An empty section is dropped: its name alone would be the key of a config group, whose value is an option.
        return tuple(leaf for leaf in _read_part("", section) if leaf[1] != "{}" or "." in leaf[0])
    return tuple(leaf for part in parts for leaf in _read_part(f"{name[1]}.", part))


@functools.lru_cache(maxsize=16384)
def _read_part(prefix: str, text: str) -> Leaves:
    content = yaml.load(text, Loader=FAST_LOADER)
    if not isinstance(content, dict):
        raise yaml.YAMLError("is not a mapping")
    values = migrate_config({prefix + path: value for path, value in leaves(content)})
    return tuple((path, cell(value)) for path, value in values.items())


def cell(value: Any) -> Cell:
    """Convert a value for the index: numbers stay numbers, all else becomes command-line syntax."""
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "null"}[value]
    if isinstance(value, int) and abs(value) >= 2**63:
        return str(value)
    # NaN does not equal itself, and SQLite would store it as NULL.
    if isinstance(value, float) and value != value:
        return "NaN"
    if isinstance(value, (int, float)):
        return value
    # SQLite rejects lone surrogates, which YAML can escape.
    text = value if isinstance(value, str) else to_json(value)
    return text.encode(errors="replace").decode()
