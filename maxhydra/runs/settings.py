"""A run's config as a flat list of settings, each marked if it differs from the schema's default."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

import yaml

from maxhydra.config import Config
from maxhydra.config.migrations import migrate_config
from maxhydra.record.atomic_io import to_json, to_plain


@dataclasses.dataclass(frozen=True)
class Setting:
    path: str
    value: str
    changed: bool


def list_settings(config_yaml: str) -> list[Setting]:
    """All leaves of config.yaml by dotted path."""
    config = migrate_config(yaml.safe_load(config_yaml) or {})
    defaults = dict(leaves(_defaults(Config, config)))
    return [
        Setting(path, _format(value), changed=path not in defaults or defaults[path] != value)
        for path, value in leaves(config)
    ]


def _defaults(schema: type, config: dict[str, Any]) -> dict[str, Any]:
    """Defaults of the schema; in a mapping of sections (layer kinds), each entry has the section's defaults."""
    hints, defaults = typing.get_type_hints(schema), {}
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
    return dict(leaves(migrate_config(yaml.safe_load(config_yaml) or {}))).get(path)


def leaves(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted path and value of every leaf; an empty mapping is a leaf."""
    if isinstance(node, dict) and node:
        for key, value in node.items():
            yield from leaves(value, f"{path}.{key}" if path else str(key))
    elif path:
        yield path, node


def _format(value: Any) -> str:
    return value if isinstance(value, str) else to_json(value)
