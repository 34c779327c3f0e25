"""Comparison of model configs: do two configs describe the same function of the same weights, and where do they differ?

Configs are compared as the modules see them, layer by layer, so different names of kinds or different patterns that
give the same layers are equal.
"""

import dataclasses
import math
from collections.abc import Callable, Iterator
from enum import Enum
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from maxhydra.config import ConfigError, Problem
from maxhydra.config.declare import Schema
from maxhydra.config.resume import ConfigChange, model_changes
from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import layer_names
from maxhydra.convert.source import Source
from maxhydra.model.decoder import DecoderSpec

# Some files store floats that were rounded to float32.
TOLERANCE = 1e-5
KEYS_WITHOUT_EFFECT_ON_WEIGHTS = (
    *("path", "context_length", "dropout", "init_scale", "dtypes.*", "remat.*", "scan_unroll", "kernels.*", "mtp.*"),
    *("kinds.*.moe.balance_weight", "kinds.*.moe.capacity_factor", "kinds.*.moe.router.bias_rate"),
    *("kinds.*.mla.indexer.loss_weight", "expert_parallel.*", "vision.tiles.*", "vision.m*_patches"),
    *("vision.videos.fps", "vision.videos.m*", "vision.videos.per_frame", "vision.videos.timestamps", "diffusion.*"),
    "vision.videos.use_audio_in_video",
)
"""Keys that a run may choose freely for given weights: they change how the model is computed, trained or initialized,
not the function that the weights represent. fnmatch patterns of paths below `model`; `kinds.*` is any layer kind."""
# Compared layer by layer instead of by value.
ARRANGEMENT_KEYS = ("prefix", "pattern", "kinds.*")


def require_same(source: Source, model: config.Model) -> None:
    """Raise ConfigError if the model differs from the one that the files describe; names every differing key."""
    file_model = _with_unspecified(source.model, model, source.unspecified)
    if model.vision.num_layers is None:
        # The text decoder of a multimodal model.
        file_model = dataclasses.replace(file_model, vision=model.vision)
    if model.audio.num_layers is None:
        file_model = dataclasses.replace(file_model, audio=model.audio)
    if model.speech.codebooks is None:
        file_model = dataclasses.replace(file_model, speech=model.speech)
    file_model = _with_videos_of(file_model, model)
    problems = list(source.check(model))
    if not is_same(file_model, model):
        problems += _differences(file_model, model, source.location)
    if problems:
        raise ConfigError(problems)


def changes_from_run(run: Path, model: config.Model) -> list[ConfigChange]:
    """Keys in which a model differs from that of a run, other than KEYS_WITHOUT_EFFECT_ON_WEIGHTS.

    A reward model may start from a language model, whose head it replaces.
    """
    changes = model_changes((run / "config.yaml").read_text(encoding="utf-8"), model)
    patterns = KEYS_WITHOUT_EFFECT_ON_WEIGHTS + (("head",) if model.head is config.Head.score else ())
    return [change for change in changes if not _matches(change.key.removeprefix("model."), patterns)]


def is_same(file_model: config.Model, model: config.Model) -> bool:
    """True if weights of one model can be used in the other."""
    return _is_close(_resolve(_with_free_keys(_with_videos_of(file_model, model), model)), _resolve(model))


def _with_videos_of(file_model: config.Model, model: config.Model) -> config.Model:
    """The files' model, without videos if the run's takes none: images and text give the same results."""
    if model.vision.video_id is not None:
        return file_model
    return dataclasses.replace(file_model, vision=dataclasses.replace(file_model.vision, video_id=None))


def _resolve(model: config.Model) -> tuple[Any, ...]:
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
    return layers, dataclasses.replace(spec, **arrangement), model.speech


def _with_free_keys(file_model: config.Model, model: config.Model) -> config.Model:
    """The files' model with the run's values of KEYS_WITHOUT_EFFECT_ON_WEIGHTS."""
    return _copy_keys(file_model, model, lambda path: _matches(path, KEYS_WITHOUT_EFFECT_ON_WEIGHTS))


def _with_unspecified(file_model: config.Model, model: config.Model, unspecified: tuple[str, ...]) -> config.Model:
    """The files' model with the run's values of keys that the files do not specify."""
    patterns = tuple(f"kinds.*.{path}{suffix}" for path in unspecified for suffix in ("", ".*"))
    return _copy_keys(file_model, model, lambda path: _matches(path, patterns))


def _matches(path: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatch(path, pattern) for pattern in patterns)


def _copy_keys(file_model: config.Model, model: config.Model, is_copied: Callable[[str], bool]) -> config.Model:
    """The files' model with the values of `model` at some paths; kinds correspond if used at the same layer."""
    kind_of = {file_kind: model.kinds[kind] for kind, file_kind in _kind_pairs(model, file_model)}

    def walk(value: Any, other: Any, path: str) -> Any:
        if is_copied(path):
            return other
        if not isinstance(value, Schema) or type(value) is not type(other):
            return value
        fields = {n: walk(field, getattr(other, n), f"{path}.{n}".lstrip(".")) for n, field in vars(value).items()}
        return type(value)(**fields)

    changed = walk(file_model, model, "")
    kinds = {name: walk(kind, kind_of.get(name, kind), f"kinds.{name}") for name, kind in file_model.kinds.items()}
    return dataclasses.replace(changed, kinds=kinds)


def _differences(file_model: config.Model, model: config.Model, location: str) -> Iterator[Problem]:
    """Keys that differ, each at the path where the run's model sets it."""
    file_values, values = _leaves(file_model, ""), _leaves(model, "")
    pairs = _kind_pairs(model, file_model)
    paths_in_kinds = {path for kind, _ in pairs for path, _ in _kind_values(model, kind).values()}
    skipped = (*KEYS_WITHOUT_EFFECT_ON_WEIGHTS, *ARRANGEMENT_KEYS)
    compared: dict[str, tuple[Any, Any]] = {
        path: (value, file_values[path])
        for path, value in values.items()
        if path not in paths_in_kinds and not _matches(path, skipped)
    }
    for kind, file_kind in pairs:
        kind_values, file_kind_values = _kind_values(model, kind), _kind_values(file_model, file_kind)
        for relative, (path, value) in kind_values.items():
            if not _matches(f"kinds.{kind}.{relative}", KEYS_WITHOUT_EFFECT_ON_WEIGHTS):
                compared[path] = (value, file_kind_values[relative][1])
    for path, (value, file_value) in compared.items():
        if not _is_close(value, file_value):
            reason = f"differs from {location}"
            yield Problem(f"model.{path}", reason, value=_format(value), accepted=_format(file_value))


def _kind_pairs(model: config.Model, file_model: config.Model) -> list[tuple[str, str]]:
    """Names of the kinds that the two models use at the same layer, each pair once."""
    return list(dict.fromkeys(zip(layer_names(model), layer_names(file_model), strict=False)))


def _kind_values(model: config.Model, name: str) -> dict[str, tuple[str, Any]]:
    """Path relative to the kind -> path below the model that sets the value, and the value.

    A size that the kind leaves null is set at the top level of the model: under its own name, or with its section as
    prefix (mlp.dim -> mlp_dim).
    """
    top = _leaves(model, "")
    values: dict[str, tuple[str, Any]] = {}
    for path, value in _leaves(model.kinds[name], "").items():
        section, _, leaf = path.rpartition(".")
        top_keys = [key for key in (leaf, f"{section}_{leaf}") if key in top]
        values[path] = (f"kinds.{name}.{path}", value)
        if value is None and top_keys:
            values[path] = (top_keys[0], top[top_keys[0]])
    return values


def _leaves(section: Any, path: str) -> dict[str, Any]:
    """Dotted path -> value of everything below a section except `kinds`."""
    if not dataclasses.is_dataclass(section):
        return {path: section}
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(section):
        if field.name != "kinds":
            leaves |= _leaves(getattr(section, field.name), f"{path}.{field.name}".lstrip("."))
    return leaves


def _is_close(a: Any, b: Any) -> bool:
    if dataclasses.is_dataclass(a) and type(a) is type(b):
        return all(_is_close(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_is_close(x, y) for x, y in zip(a, b, strict=True))
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=TOLERANCE)
    return bool(a == b)


def _format(value: Any) -> str:
    value = value.value if isinstance(value, Enum) else value
    return "null" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
