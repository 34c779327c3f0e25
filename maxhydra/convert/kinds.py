"""Lists of what each layer is, as others write them, and patterns, as we do."""

from collections.abc import Mapping, Sequence
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, UnsupportedError

# Their types of layers, by whether they have a window, and our names of such kinds.
WINDOWED, FULL = "sliding_attention", "full_attention"
NAMES = {WINDOWED: "local", FULL: "global"}


def pattern_of(names: Sequence[str]) -> list[str]:
    """The shortest list that gives these names when repeated, the last time perhaps in part."""
    lengths = range(1, len(names) + 1)
    length = next(n for n in lengths if all(name == names[i % n] for i, name in enumerate(names)))
    return list(names[:length])


def layer_kinds(model: config.Model) -> list[config.Kind]:
    """The kind of every layer, from first to last."""
    repeated = model.num_layers - len(model.prefix)
    names = [*model.prefix, *(model.pattern[i % len(model.pattern)] for i in range(repeated))]
    return [model.kinds[name] for name in names]


def layer_types(settings: Settings, *, every: int) -> list[str]:
    """Their type of each layer: as told, or every n-th sees all before it and the others a window."""
    numbers = range(1, settings["num_hidden_layers"] + 1)
    return list(settings.get("layer_types") or [WINDOWED if number % every else FULL for number in numbers])


def arranged(types: Sequence[str], *, windowed: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Pattern and kinds of a model whose layers are of these types."""
    kinds = {WINDOWED: windowed, FULL: full}
    used = list(dict.fromkeys(types))
    if unknown := [name for name in used if name not in kinds]:
        raise UnsupportedError(f"layer_types with {', '.join(unknown)}, where {', '.join(kinds)} are served")
    pattern = [NAMES[name] for name in pattern_of(types)]
    return {"pattern": pattern, "kinds": {NAMES[name]: dict(kinds[name]) for name in used}}


def window_settings(model: config.Model) -> Settings:
    """Types of layers, and the window, which is one for all that have one."""
    windows = [kind.attention.window for kind in layer_kinds(model)]
    types = [FULL if window is None else WINDOWED for window in windows]
    return {"layer_types": types, "sliding_window": next((window for window in windows if window), None)}


def by_type(model: config.Model) -> dict[str, config.Kind]:
    """The layer kind of each type; of a type that no layer has, that of the first layer."""
    kinds = layer_kinds(model)
    of_type = {FULL if kind.attention.window is None else WINDOWED: kind for kind in reversed(kinds)}
    return {WINDOWED: kinds[0], FULL: kinds[0], **of_type}
