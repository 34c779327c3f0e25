"""Conversion between a Hugging Face config.json and the `model` section of a config.

The first part reads config.json with the table of its model_type. The second part has the keys that families share, for
use by tables. jax is not imported: `model=from_hf` runs this while the config is composed.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException

from maxhydra.config import ConfigError, Problem
from maxhydra.config.declare import MAX_LAYERS, Schema
from maxhydra.config.options import model_from
from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, all_tables
from maxhydra.modelfiles import model_path
from maxhydra.record.atomic_io import read_json

CONFIG = "config.json"
# Settings that are a number of layers, in addition to those that end in _layers.
LAYER_COUNTS = ("n_layer", "first_k_dense_replace")
# Sections of config.json are nested two deep: text_config.rope_parameters.
MAX_NESTING = 4
# Larger integers overflow the arrays that are made of them; no setting of a published model is near it.
MAX_SETTING = 2**62
# Endings of the classes of transformers for language models, and for reward models.
CAUSAL, CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")


def hf_model_section(key: str, location: str) -> dict[str, Any]:
    """The `model` section described by a Hugging Face folder, of a multimodal one the text decoder."""
    values = _model_values(key, location)
    return {"model": {name: value for name, value in values.items() if name not in ("vision", "audio", "speech")}}


def hf_vision_section(key: str, location: str) -> dict[str, Any]:
    """The section `model.vision` described by a Hugging Face folder."""
    accepted = "a folder of Gemma 3, Gemma 4, Llama 4, Qwen3-VL, Qwen3.5 or Qwen3-Omni"
    return _part_section("vision", key, location, missing="image encoder", accepted=accepted)


def hf_audio_section(key: str, location: str) -> dict[str, Any]:
    """The section `model.audio` described by a Hugging Face folder."""
    accepted = "a folder of Gemma 4 or Qwen3-Omni"
    return _part_section("audio", key, location, missing="audio encoder", accepted=accepted)


def hf_speech_section(key: str, location: str) -> dict[str, Any]:
    """The section `model.speech` described by a Hugging Face folder."""
    return _part_section("speech", key, location, missing="talker", accepted="a folder of Qwen3-Omni with its talker")


def _part_section(name: str, key: str, location: str, *, missing: str, accepted: str) -> dict[str, Any]:
    values = _model_values(key, location)
    if name not in values:
        reason, hint = f"has no {missing} of a supported kind", "choose model=from_hf"
        raise ConfigError(Problem(key, reason, value=location, accepted=accepted, hint=hint))
    return {"model": {name: values[name]}}


def _model_values(key: str, location: str) -> dict[str, Any]:
    folder = model_path(key, location, weights=False)
    if not is_hf_folder(folder):
        reason = f"has no {CONFIG}" if folder.is_dir() else "is not a folder"
        accepted = "a Hugging Face folder, or ORG/NAME on the hub"
        raise ConfigError(Problem(key, reason, value=location, accepted=accepted))
    settings = read_settings(key, location, folder)
    values = to_model_values(key, location, find_table(key, location, settings), settings)
    build_model(key, location, values)
    return values


def hf_run_section(location: str) -> dict[str, Any]:
    """Config values outside `model` that a folder determines: its tokenizer, if it has one."""
    folder = model_path("model.path", location, weights=False)
    has_tokenizer = any((folder / name).is_file() for name in TOKENIZER_FILES)
    return {"data": {"tokenizer": {"kind": "hf", "path": location}}} if has_tokenizer else {}


def is_hf_folder(path: Path) -> bool:
    return (path / CONFIG).is_file()


def read_settings(key: str, location: str, folder: Path) -> Settings:
    """Contents of config.json. `key` is the config field whose value is `location`, for errors."""
    try:
        settings = read_json(folder / CONFIG)
    except (OSError, ValueError) as error:
        raise ConfigError(Problem(key, f"{CONFIG} cannot be read: {error}", value=location)) from None
    if not isinstance(settings, dict):
        raise ConfigError(Problem(key, f"{CONFIG} is not a JSON object", value=location))
    return settings


def find_table(key: str, location: str, settings: Settings) -> Table:
    """The table of config.json's model_type."""
    tables = {name: table for table in all_tables() for name in table.hf_types}
    model_type = settings.get("model_type")
    if not isinstance(model_type, str) or model_type not in tables:
        raise unknown_family(key, location, f"model_type {model_type}", list(tables))
    return tables[model_type]


def to_model_values(key: str, location: str, table: Table, settings: Settings) -> dict[str, Any]:
    """Values of the `model` section, as YAML would hold them."""
    try:
        _check_sizes(settings)
        return to_values(table, settings)
    except KeyError as error:
        reason = f"{CONFIG} lacks {error.args[0]}"
    except UnsupportedError as error:
        reason = f"{CONFIG} has {error}"
    except (TypeError, ValueError, AttributeError, IndexError, ArithmeticError) as error:
        reason = f"{CONFIG} has values of the wrong type for its model_type: {error}"
    raise ConfigError(Problem(key, reason, value=location))


def to_values(table: Table, settings: Settings) -> dict[str, Any]:
    """Values of the `model` section; a sequence classifier has a score head, and must have one label."""
    # "vision": tokens of the same image attend to each other.
    if (direction := settings.get("use_bidirectional_attention")) not in (None, False, "vision"):
        raise UnsupportedError(f"unsupported use_bidirectional_attention={direction} (supported: false, vision)")
    values = table.to_model(settings)
    if not (settings.get("architectures") or [""])[0].endswith(CLASSIFIER):
        return values
    # transformers omits id2label for the default of two labels.
    if (labels := len(settings["id2label"]) if settings.get("id2label") else 2) != 1:
        raise UnsupportedError(f"a classifier of {labels} labels (supported: 1, a reward model)")
    return {**values, "head": config.Head.score.value}


def to_hf_settings(table: Table, model: config.Model) -> Settings | None:
    """Inverse of `to_values`, with the class of the model; None if the family cannot represent it."""
    settings, hf_class = table.to_settings(model), table.hf_types[table.model_type]
    if settings is None or model.head is not config.Head.score:
        return settings if settings is None else {"architectures": [hf_class], **settings}
    if not hf_class.endswith(CAUSAL):
        return None
    classifier = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    return {"architectures": [hf_class.removesuffix(CAUSAL) + CLASSIFIER], **settings, **classifier}


def _check_sizes(settings: Mapping[str, Any], prefix: str = "") -> None:
    """Reject sizes that no model has, before a table builds a list with an entry per layer."""
    for name, value in settings.items():
        size = len(value) if isinstance(value, list) else value
        if isinstance(value, Mapping) and prefix.count(".") < MAX_NESTING:
            _check_sizes(value, f"{prefix}{name}.")
        elif isinstance(size, (int, float)) and size > _largest(name, value):
            kind = f"with {size} items" if isinstance(value, list) else f"= {size:.6g}"
            raise UnsupportedError(f"{prefix}{name} {kind} (at most {_largest(name, value)})")


def _largest(name: str, value: Any) -> float:
    """The largest accepted value of a setting, or length of a list."""
    if name in LAYER_COUNTS or name.endswith("_layers") or (isinstance(value, list) and "layer" in name):
        return MAX_LAYERS
    return MAX_SETTING if isinstance(value, int) else math.inf


def build_model(key: str, location: str, values: dict[str, Any]) -> config.Model:
    """Validate the values of the `model` section against the schema; errors name the location."""
    try:
        return model_from(values, source=location)
    except OmegaConfBaseException as error:
        reason = f"{CONFIG} describes an invalid model: {str(error).splitlines()[0]}"
        raise ConfigError(Problem(key, reason, value=location)) from None


def unknown_family(key: str, location: str, identifier: str, supported: list[str]) -> ConfigError:
    """Error for a model family without a table."""
    hint = "to add a family, write a table in maxhydra/convert/tables (docs/models.md)"
    reason = f"has unsupported {identifier}"
    return ConfigError(Problem(key, reason, value=location, accepted=", ".join(sorted(supported)), hint=hint))


# Key of our `model` section -> key of config.json, for most families.
SIZES = {
    "num_layers": "num_hidden_layers",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
}
# hidden_act -> model.kinds.*.mlp.activation
ACTIVATIONS = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu_squared",
    "sigmoid": "sigmoid",
    "swish": "silu",
}
# Default base of the RoPE wavelengths (Su et al., 2021).
THETA = 10000.0
# RoPE scaling: rope_type -> our key -> key of config.json.
ROPE_SCALINGS = {
    "linear": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
        "original_context": "original_max_position_embeddings",
    },
    "yarn": {
        "factor": "factor",
        "original_context": "original_max_position_embeddings",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "truncate": "truncate",
        "attention_factor": "attention_factor",
    },
}


def sizes(settings: Settings, names: Mapping[str, str] = SIZES) -> dict[str, Any]:
    """Sizes of the model; num_kv_heads defaults to num_heads, head_dim to emb_dim / num_heads."""
    filled = dict(settings)
    heads = settings[names["num_heads"]]
    if filled.get(names["num_kv_heads"]) is None:
        filled[names["num_kv_heads"]] = heads
    if filled.get(names["head_dim"]) is None:
        filled[names["head_dim"]] = settings[names["emb_dim"]] // heads
    return {key: filled[hf_key] for key, hf_key in names.items()}


def size_settings(section: Schema, names: Mapping[str, str] = SIZES) -> Settings:
    """Inverse of `sizes`, for the section `model` or another one that has these keys."""
    return {hf_key: getattr(section, key) for key, hf_key in names.items()}


def head(settings: Settings, *, tied: bool) -> str:
    """Value of model.head; `tied` is the family's default of tie_word_embeddings."""
    return "tied" if settings.get("tie_word_embeddings", tied) else "separate"


def activation(name: str) -> str:
    """Activation of the feed-forward for a value of hidden_act."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"unsupported hidden_act={name} (supported: {', '.join(ACTIVATIONS)})")
    return ACTIVATIONS[name]


def require_silu(settings: Settings, key: str = "hidden_act") -> None:
    """Reject other activations of linear attention layers."""
    if (name := settings.get(key, "silu")) != "silu":
        raise UnsupportedError(f"unsupported {key}={name} of linear_attention layers (supported: silu)")


def activation_setting(value: config.Activation) -> str:
    """Inverse of `activation`: the first hidden_act of that meaning."""
    return next(hf_name for hf_name, name in ACTIVATIONS.items() if name == value.value)


def rope(settings: Settings, *, is_partial: bool = False) -> dict[str, Any]:
    """RoPE of a model whose layers all share one; see `rope_from`."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    return rope_from(parameters, settings, is_partial=is_partial)


def rope_from(parameters: Mapping[str, Any], settings: Settings, *, is_partial: bool = False) -> dict[str, Any]:
    """RoPE from rope_parameters, or from rope_scaling with the top-level rope_theta of older files.

    `is_partial`: whether layers of this family rotate a part of each head; transformers ignores
    partial_rotary_factor in the others.
    """
    theta = parameters.get("rope_theta") or settings.get("rope_theta") or THETA
    values: dict[str, Any] = {"theta": float(theta)}
    share = parameters.get("partial_rotary_factor") or settings.get("partial_rotary_factor")
    if share not in (None, 1) and not is_partial:
        raise UnsupportedError(f"unsupported partial_rotary_factor={share} (supported: 1)")
    values |= {} if share is None else {"share": float(share)}
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if kind == "default":
        return values
    if kind not in ROPE_SCALINGS:
        raise UnsupportedError(f"unsupported rope_type={kind} (supported: default, {', '.join(ROPE_SCALINGS)})")
    if kind == "yarn":
        parameters = {"original_max_position_embeddings": settings["max_position_embeddings"], **parameters}
        if not parameters.get("attention_factor"):
            parameters |= {"attention_factor": _attention_factor(parameters)}
    scaling = {
        key: parameters[hf_key] for key, hf_key in ROPE_SCALINGS[kind].items() if parameters.get(hf_key) is not None
    }
    return {"kind": kind, **values} | scaling


def _attention_factor(parameters: Mapping[str, Any]) -> float | None:
    """YaRN's attention factor, if given as mscale and mscale_all_dim (DeepSeek-V2, 2024)."""
    if not (parameters.get("mscale") and parameters.get("mscale_all_dim")):
        return None
    numerator, denominator = (
        0.1 * parameters[scale] * math.log(parameters["factor"]) + 1.0 for scale in ("mscale", "mscale_all_dim")
    )
    return numerator / denominator


def rope_settings(rope: config.Rope) -> Settings:
    """Inverse of `rope`, with keys that every version of transformers reads."""
    share = {} if rope.share == 1 else {"partial_rotary_factor": rope.share}
    return {"rope_theta": rope.theta, "rope_scaling": _scaling_settings(rope) or None, **share}


def rope_parameters(rope: config.Rope) -> Settings:
    """The rope_parameters of one layer type, for families whose layer types differ."""
    return {"rope_type": "default", "rope_theta": rope.theta, **_scaling_settings(rope)}


def _scaling_settings(rope: config.Rope) -> Settings:
    names = ROPE_SCALINGS.get(rope.kind.value, {}).items()
    scaling = {hf_key: getattr(rope, key) for key, hf_key in names if getattr(rope, key) is not None}
    return {"rope_type": rope.kind.value, **scaling} if scaling else {}


def rotated_layers(settings: Settings) -> list[bool]:
    """Whether each layer has RoPE: no_rope_layers, or all but every no_rope_layer_interval-th."""
    count, every = settings["num_hidden_layers"], settings.get("no_rope_layer_interval", 4)
    flags = settings.get("no_rope_layers") or [number % every for number in range(1, count + 1)]
    if len(flags) < count:
        raise UnsupportedError(f"no_rope_layers of {len(flags)} layers (supported: num_hidden_layers={count})")
    return [bool(flag) for flag in flags[:count]]


# Values of layer_types in config.json, and the layer kinds they become.
WINDOWED, FULL = "sliding_attention", "full_attention"
KIND_NAMES = {WINDOWED: "local", FULL: "global"}


def layer_names(model: config.Model) -> list[str]:
    """Name of the kind of every layer, from first to last."""
    repeated = model.num_layers - len(model.prefix)
    return [*model.prefix, *(model.pattern[i % len(model.pattern)] for i in range(repeated))]


def layer_kinds(model: config.Model) -> list[config.Kind]:
    """The kind of every layer, from first to last."""
    return [model.kinds[name] for name in layer_names(model)]


def pattern_of(names: Sequence[str]) -> list[str]:
    """The shortest list whose repetition gives these names; the last repetition may be partial."""
    # The longest proper prefix of names[:i] that is also its suffix (Knuth, Morris and Pratt, 1977): linear in the
    # number of layers, where trying every length is quadratic.
    overlap = [0] * (len(names) + 1)
    length = 0
    for index in range(1, len(names)):
        while length and names[index] != names[length]:
            length = overlap[length]
        length += names[index] == names[length]
        overlap[index + 1] = length
    return list(names[: len(names) - overlap[len(names)]])


def layer_types(settings: Settings, *, every: int) -> list[str]:
    """The layer_types of config.json; default: every n-th layer has full attention, the others a window."""
    numbers = range(1, settings["num_hidden_layers"] + 1)
    return list(settings.get("layer_types") or [WINDOWED if number % every else FULL for number in numbers])


def windowed_layers(types: Sequence[str], *, windowed: Mapping[str, Any], full: Mapping[str, Any]) -> dict[str, Any]:
    """Pattern and kinds of a model with these layer_types."""
    kinds = {WINDOWED: windowed, FULL: full}
    used = list(dict.fromkeys(types))
    if unknown := [name for name in used if name not in kinds]:
        raise UnsupportedError(f"unsupported layer_types {', '.join(unknown)} (supported: {', '.join(kinds)})")
    pattern = [KIND_NAMES[name] for name in pattern_of(types)]
    return {"pattern": pattern, "kinds": {KIND_NAMES[name]: dict(kinds[name]) for name in used}}


def window_settings(model: config.Model) -> Settings:
    """The layer_types of a model, and its sliding_window, which all windowed layers share."""
    windows = [kind.attention.window for kind in layer_kinds(model)]
    types = [FULL if window is None else WINDOWED for window in windows]
    return {"layer_types": types, "sliding_window": next((window for window in windows if window), None)}


def kind_by_type(model: config.Model) -> dict[str, config.Kind]:
    """The layer kind of each layer type; a type without layers gets the kind of the first layer."""
    kinds = layer_kinds(model)
    of_type = {FULL if kind.attention.window is None else WINDOWED: kind for kind in reversed(kinds)}
    return {WINDOWED: kinds[0], FULL: kinds[0], **of_type}
