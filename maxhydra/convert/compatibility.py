"""Whether two model configs mean the same to a set of weights, whatever words they use, and where they do not."""

import dataclasses
import math
from collections.abc import Iterator
from enum import Enum
from fnmatch import fnmatch
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.declare import Schema
from maxhydra.config.schema import model as config
from maxhydra.convert.source import Source
from maxhydra.model.decoder import DecoderSpec

# Rounded through float32 in some files.
TOLERANCE = 1e-5
# What a run is free to choose: how it computes, trains or begins, not what weights mean. Patterns (fnmatch) of paths
# below the model; those of a layer kind begin with `kinds.*`.
FREE = (
    *("path", "context_length", "dropout", "init_scale", "dtypes.*", "remat.*", "scan_unroll", "kernels.*", "mtp.*"),
    *("kinds.*.moe.balance_weight", "kinds.*.moe.capacity_factor", "kinds.*.moe.router.bias_rate"),
    "kinds.*.mla.indexer.loss_weight",
)
# Which kind stands where is compared layer by layer.
ARRANGED = ("prefix", "pattern", "kinds.*")


def require_same(source: Source, model: config.Model) -> None:
    """Refuse a model that means something else than the files state, naming every setting that differs."""
    stated = _with_silent(source.model, model, source.silent)
    problems = list(source.check(model))
    if not is_same(stated, model):
        problems += _named(stated, model, source.location)
    if problems:
        raise ConfigError(problems)


def is_same(stated: config.Model, model: config.Model) -> bool:
    """Whether weights of one can be used in the other."""
    return _is_close(_resolved(_freed(stated, model)), _resolved(model))


def _resolved(model: config.Model) -> tuple[Any, ...]:
    """The model as its modules see it, layer by layer, without the names of kinds."""
    spec = DecoderSpec.of(model)
    layers = tuple(dataclasses.replace(layer, name="") for layer in spec.layers)
    arrangement: dict[str, Any] = {
        "prefix": (),
        "pattern": (),
        "remainder": (),
        "repetitions": 0,
        "unroll": 1,
        "mtp": (),
    }
    return layers, dataclasses.replace(spec, **arrangement)


def _freed(stated: config.Model, model: config.Model) -> config.Model:
    """The stated model with the run's own choices."""
    return _changed(stated, model, lambda path: any(fnmatch(path, pattern) for pattern in FREE))


def _with_silent(stated: config.Model, model: config.Model, silent: tuple[str, ...]) -> config.Model:
    patterns = [f"kinds.*.{path}{more}" for path in silent for more in ("", ".*")]
    return _changed(stated, model, lambda path: any(fnmatch(path, pattern) for pattern in patterns))


def _changed(stated: config.Model, model: config.Model, is_chosen: Any) -> config.Model:
    """The stated model with the values of another at some paths; kinds correspond by the layers they stand at."""
    own = {theirs: model.kinds[ours] for ours, theirs in _pairs(model, stated)}

    def walk(one: Any, other: Any, path: str) -> Any:
        if is_chosen(path):
            return other
        if not isinstance(one, Schema) or type(one) is not type(other):
            return one
        found = {n: walk(value, getattr(other, n), f"{path}.{n}".lstrip(".")) for n, value in vars(one).items()}
        return type(one)(**found)

    changed = walk(stated, model, "")
    kinds = {name: walk(kind, own.get(name, kind), f"kinds.{name}") for name, kind in stated.kinds.items()}
    return dataclasses.replace(changed, kinds=kinds)


def _named(stated: config.Model, model: config.Model, location: str) -> Iterator[Problem]:
    """Settings that differ, by the path at which the model has them."""
    theirs, ours = _leaves(stated, ""), _leaves(model, "")
    through_kinds = {name for ours_, _ in _pairs(model, stated) for name, _ in _of_kind(model, ours_).values()}
    found: dict[str, tuple[Any, Any]] = {
        path: (value, theirs[path])
        for path, value in ours.items()
        if path not in through_kinds and not any(fnmatch(path, pattern) for pattern in (*FREE, *ARRANGED))
    }
    for our_kind, their_kind in _pairs(model, stated):
        mine, other = _of_kind(model, our_kind), _of_kind(stated, their_kind)
        for below, (path, value) in mine.items():
            if not any(fnmatch(f"kinds.{our_kind}.{below}", pattern) for pattern in FREE):
                found[path] = (value, other[below][1])
    for path, (value, other) in found.items():
        if not _is_close(value, other):
            yield Problem(f"model.{path}", f"differs from {location}", value=_shown(value), accepted=_shown(other))


def _pairs(model: config.Model, stated: config.Model) -> list[tuple[str, str]]:
    """Our kind and theirs at the same layer, each pair once."""
    return list(dict.fromkeys(zip(_arranged(model), _arranged(stated), strict=False)))


def _arranged(model: config.Model) -> list[str]:
    """The kind of every layer."""
    repeated = model.num_layers - len(model.prefix)
    pattern = [model.pattern[place % len(model.pattern)] for place in range(repeated)]
    return [*model.prefix, *pattern]


def _of_kind(model: config.Model, name: str) -> dict[str, tuple[str, Any]]:
    """Path below the kind -> path below the model where the value stands, and the value.

    A size that the kind leaves open stands at the model's top: under its own name, or with the section's before it.
    """
    top = _leaves(model, "")
    found: dict[str, tuple[str, Any]] = {}
    for path, value in _leaves(model.kinds[name], "").items():
        section, _, leaf = path.rpartition(".")
        general = [at for at in (leaf, f"{section}_{leaf}") if at in top]
        found[path] = (f"kinds.{name}.{path}", value)
        if value is None and general:
            found[path] = (general[0], top[general[0]])
    return found


def _leaves(section: Any, path: str) -> dict[str, Any]:
    """Dotted path -> value, for everything below a section but the kinds by name."""
    if not dataclasses.is_dataclass(section):
        return {path: section}
    found: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if field.name != "kinds":
            found |= _leaves(getattr(section, field.name), f"{path}.{field.name}".lstrip("."))
    return found


def _is_close(one: Any, other: Any) -> bool:
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(_is_close(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)):
        return len(one) == len(other) and all(_is_close(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE)
    return bool(one == other)


def _shown(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
