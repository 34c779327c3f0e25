"""Types of the sections `options`, which belong to the objects of the user that a config names.

Objects that this process calls are imported when a config is composed; those of worker processes only if the config
sets options for them.
"""

import dataclasses
import pickle
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.declare import Options, PlugInUse
from maxhydra.config.errors import ConfigError, Problem
from maxhydra.config.fields import Field, walk
from maxhydra.config.plug_ins import OPTIONS, is_plug_in, load_object, options_class
from maxhydra.config.schema.config import Config


@cache
def plug_in_fields() -> dict[str, Field]:
    """Return the keys that can name an object; `*` in a path is any entry of a dict."""
    return {path: field for path, field in walk(Config) if field.spec.plug_in is not None}


def named_objects(values: Mapping[str, Any]) -> Iterator[tuple[str, str, Field]]:
    """Yield path, value and field of each key in nested plain values that names an object of the user."""
    for pattern, field in plug_in_fields().items():
        for path, value in _find(values, pattern.split(".")):
            for item in value if isinstance(value, list) else [value]:
                if is_plug_in(item):
                    yield path, item, field


def _find(values: Any, names: list[str], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of each key that matches a pattern."""
    if not names:
        yield prefix, values
    elif isinstance(values, Mapping):
        for name in [*values] if names[0] == "*" else [name for name in names[:1] if name in values]:
            yield from _find(values[name], names[1:], f"{prefix}.{name}" if prefix else str(name))


def option_types(layers: Iterable[Mapping[str, Any]]) -> dict[str, type[Options] | Problem]:
    """Return the class of each section `options` that belongs to an object, or why it is unknown, by path.

    `layers` are nested plain values from the root of the config; later ones override earlier ones.
    """
    merged: dict[str, Any] = {}
    for layer in layers:
        _merge(merged, layer)
    types: dict[str, type[Options] | Problem] = {}
    for key, path, field in named_objects(merged):
        section = f"{key.rpartition('.')[0]}.{OPTIONS}"
        values = next(iter(value for _, value in _find(merged, section.split("."))), None)
        if field.spec.plug_in is PlugInUse.worker and not values:
            continue
        try:
            cls = options_class(load_object(path, key=key), key=key)
        except ConfigError as error:
            types[section] = error.problems[0]
            continue
        if cls is not None:
            types[section] = cls
    return types


def _merge(target: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for name, value in layer.items():
        if isinstance(value, Mapping):
            below = target.get(name)
            target[name] = below if isinstance(below, dict) else {}
            _merge(target[name], value)
        else:
            target[name] = value


def nested(path: str, value: Any) -> dict[str, Any]:
    """Return a value as nested mappings from the root of the config."""
    for name in reversed(path.split(".") if path else []):
        value = {name: value}
    return value if isinstance(value, dict) else {}


@cache
def schema_node(cls: type) -> DictConfig:
    """Return the config node of a schema class with its defaults; shared, so callers copy it before they change it."""
    # OmegaConf copies each section into its parent, which is a sixth of the time, unless this flag is set.
    node: DictConfig = OmegaConf.structured(cls, flags={"no_deepcopy_set_nodes": True})
    node._set_flag("no_deepcopy_set_nodes", None)
    return node


def new_node(cls: type) -> DictConfig:
    """Return a new config node of a class of the schema; unpickling takes a fifth of the time of copy.deepcopy."""
    node: DictConfig = pickle.loads(_pickled_node(cls))
    return node


@cache
def _pickled_node(cls: type) -> bytes:
    return pickle.dumps(schema_node(cls), pickle.HIGHEST_PROTOCOL)


@cache
def dicts_of_sections() -> dict[str, type]:
    """Return the keys whose values are dicts of sections, with the class of these sections."""
    specs = {path: field.spec for path, field in walk(Config) if field.spec.type is dict and "*" not in path}
    return {path: spec.item.type for path, spec in specs.items() if spec.item is not None and spec.item.is_section}


def set_section_type(node: DictConfig, path: str, section: DictConfig) -> None:
    """Set the section at a path of a config node to a copy of a node with more fields; create dict entries above it."""
    names, parent = path.split("."), node
    for depth, name in enumerate(names[:-1]):
        if name not in parent:
            OmegaConf.update(node, ".".join(names[:depth]), {name: {}}, merge=True)
        parent = parent[name]
    parent[names[-1]] = section


def used_objects(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each object of the user in a config."""
    yield from ((key, path) for key, path, _ in named_objects(dataclasses.asdict(config)))
