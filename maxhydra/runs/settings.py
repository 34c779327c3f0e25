"""A run's config as a flat list, each value marked where it differs from the schema's default."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from maxhydra.config import Config
from maxhydra.config.migrations import migrate_config
from maxhydra.record.atomic_io import plain, to_json


@dataclasses.dataclass(frozen=True)
class Setting:
    path: str
    value: str
    changed: bool


def settings(config_yaml: str) -> list[Setting]:
    """Every leaf of config.yaml under its dotted path."""
    given = migrate_config(yaml.safe_load(config_yaml) or {})
    defaults = dict(leaves(_defaults(Config, given)))
    return [
        Setting(path, _shown(value), changed=path not in defaults or defaults[path] != value)
        for path, value in leaves(given)
    ]


def _defaults(schema: type, given: dict[str, Any]) -> dict[str, Any]:
    """The schema's defaults; the entries of a mapping of sections (layer kinds) each have that section's."""
    hints, found = typing.get_type_hints(schema), {}
    for field in dataclasses.fields(schema):
        here, hint = given.get(field.name), hints[field.name]
        entry = (typing.get_args(hint) or (None,))[-1]
        if dataclasses.is_dataclass(hint):
            found[field.name] = _defaults(typing.cast(type, hint), here or {})
        elif dataclasses.is_dataclass(entry) and isinstance(here, dict):
            found[field.name] = {name: _defaults(typing.cast(type, entry), value or {}) for name, value in here.items()}
        elif field.default_factory is not dataclasses.MISSING:
            found[field.name] = plain(field.default_factory())
        else:
            found[field.name] = plain(field.default)
    return found


def lookup(config_yaml: str, path: str) -> Any:
    """One value of config.yaml, or None."""
    return dict(leaves(migrate_config(yaml.safe_load(config_yaml) or {}))).get(path)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of everything that is not a mapping, or an empty one."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)
