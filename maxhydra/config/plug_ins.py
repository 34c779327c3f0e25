"""Objects of the user, which config keys name as `package.module:object`, and the settings of such objects.

Every key that can name an object is declared with `option(plug_in=...)`, and the section next to it, `options`, belongs
to the object: if the object has a parameter `options`, the schema class that annotates it defines the keys of the
section, and they are merged, validated and stored like all others (option_types.py).
"""

import importlib
import inspect
import re
import typing
from collections.abc import Callable
from typing import Any, cast

from maxhydra.config.declare import Options
from maxhydra.config.errors import ConfigError, Problem, did_you_mean

OPTIONS = "options"
# Path of an object of the user.
PLUG_IN_FORM, PLUG_IN = "package.module:object", re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


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
