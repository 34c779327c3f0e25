"""Objects of the user, which config keys name as `package.module:object`, and the settings of such objects.

Every key that can name an object is declared with `option(plug_in=...)`, and the section next to it, `options`, belongs
to the object: if the object has a parameter `options`, the schema class that annotates it defines the keys of the
section, and they are merged, validated and stored like all others. Objects that this process calls are imported when a
config is composed; those of worker processes only if the config sets options for them.
"""

import dataclasses
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from maxhydra.config.declare import Options, PlugInUse
from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.config.fields import PLUG_IN, Field, walk
from maxhydra.config.schema.config import Config

OPTIONS = "options"


def is_plug_in(value: Any) -> bool:
    """Return whether the value of a key names an object of the user."""
    return isinstance(value, str) and PLUG_IN.fullmatch(value) is not None


def load_object(path: str, *, key: str) -> Callable[..., Any]:
    """Return the object at `package.module:object`; raise ConfigError about `key` if there is none."""
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except ModuleNotFoundError as error:
        hint = "check the name, and install its package or add its folder to PYTHONPATH"
        raise ConfigError(Problem(key, f"the module {error.name} is not installed", path, hint=hint)) from None
    except AttributeError:
        known = [known for known in vars(importlib.import_module(module)) if not known.startswith("_")]
        hint = did_you_mean(name, known) or "check the name"
        raise ConfigError(Problem(key, f"{module} has no {name!r}", path, hint=hint)) from None
    except Exception as error:
        raise ConfigError(Problem(key, f"cannot be imported: {type(error).__name__}: {error}", path)) from None
    if not callable(found):
        raise ConfigError(Problem(key, "is not a function or class", path))
    return cast(Callable[..., Any], found)


def options_class(plug_in: Callable[..., Any], *, key: str) -> type[Options] | None:
    """Return the class that annotates the parameter `options` of an object; None if it has no such parameter."""
    if OPTIONS not in inspect.signature(plug_in).parameters:
        return None
    parameters = cast(Any, plug_in).__init__ if isinstance(plug_in, type) else plug_in
    annotation = typing.get_type_hints(parameters).get(OPTIONS)
    if not (isinstance(annotation, type) and issubclass(annotation, Options)):
        reason = "has a parameter `options` whose annotation is not a class of settings"
        hint = "annotate it with a class that is decorated with maxhydra.schema and derives from maxhydra.Options"
        raise ConfigError(Problem(key, reason, f"{plug_in.__module__}:{plug_in.__qualname__}", hint=hint))
    return annotation


def bind_options(plug_in: Callable[..., Any], options: Options, *, key: str) -> dict[str, Options]:
    """Return the keyword arguments of an object: its options, if it has any."""
    cls = options_class(plug_in, key=key)
    if cls is None:
        return {}
    # Options of an object that only worker processes import have the type Options as long as none is set.
    return {OPTIONS: options if isinstance(options, cls) else cls()}


def call_plug_in(path: str, *arguments: Any, options: Options, key: str, **named: Any) -> Any:
    """Call the object at a path with its options."""
    plug_in = load_object(path, key=key)
    return plug_in(*arguments, **named, **bind_options(plug_in, options, key=key))


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


def set_section_type(node: DictConfig, path: str, cls: type) -> None:
    """Give the section at a path of a config node the fields of a subclass, and create the dict entries above it."""
    names, parent = path.split("."), node
    for depth, name in enumerate(names[:-1]):
        if name not in parent:
            OmegaConf.update(node, ".".join(names[:depth]), {name: {}}, merge=True)
        parent = parent[name]
    parent[names[-1]] = OmegaConf.structured(cls)


def used_objects(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the key and the path of each object of the user in a config."""
    yield from ((key, path) for key, path, _ in named_objects(dataclasses.asdict(config)))
