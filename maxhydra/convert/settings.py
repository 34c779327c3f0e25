"""Keys of config.json that families share, as our model config and back. A table takes what its family has."""

import math
from collections.abc import Mapping
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, UnsupportedError

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
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh"}
# Base of rotary wavelengths where files do not state one (Su et al., 2021).
THETA = 10000.0
# How wavelengths are stretched: rope_type -> our key -> theirs.
STRETCHES = {
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
    """Our sizes, by the names of the family; heads share keys unless said otherwise, and fill the stream."""
    filled = dict(settings)
    heads = settings[names["num_heads"]]
    if filled.get(names["num_kv_heads"]) is None:
        filled[names["num_kv_heads"]] = heads
    if filled.get(names["head_dim"]) is None:
        filled[names["head_dim"]] = settings[names["emb_dim"]] // heads
    return {ours: filled[theirs] for ours, theirs in names.items()}


def size_settings(model: config.Model, names: Mapping[str, str] = SIZES) -> Settings:
    """The same back."""
    return {theirs: getattr(model, ours) for ours, theirs in names.items()}


def head(settings: Settings, *, tied: bool) -> str:
    """Whether the head is the embedding; `tied` is the family's default."""
    return "tied" if settings.get("tie_word_embeddings", tied) else "separate"


def activation(name: str) -> str:
    """The function on the gate."""
    if name not in ACTIVATIONS:
        raise UnsupportedError(f"hidden_act={name}, where {', '.join(ACTIVATIONS)} are served")
    return ACTIVATIONS[name]


def activation_setting(value: config.Activation) -> str:
    """The first name of theirs for it."""
    return next(theirs for theirs, ours in ACTIVATIONS.items() if ours == value.value)


def rope(settings: Settings) -> dict[str, Any]:
    """Rotary positions of a model in which all layers turn alike."""
    return rope_of(settings.get("rope_parameters") or settings.get("rope_scaling") or {}, settings)


def rope_of(told: Mapping[str, Any], settings: Settings) -> dict[str, Any]:
    """Rotary positions as `told` has them: rope_parameters, or in older files rope_scaling and rope_theta beside it."""
    found: dict[str, Any] = {"theta": float(told.get("rope_theta") or settings.get("rope_theta") or THETA)}
    share = told.get("partial_rotary_factor") or settings.get("partial_rotary_factor")
    found |= {} if share is None else {"share": float(share)}
    kind = told.get("rope_type") or told.get("type") or "default"
    if kind == "default":
        return found
    if kind not in STRETCHES:
        raise UnsupportedError(f"rope_type={kind}, where default, {', '.join(STRETCHES)} are served")
    if kind == "yarn":
        told = {"original_max_position_embeddings": settings["max_position_embeddings"], **told}
        told |= {} if told.get("attention_factor") else {"attention_factor": _attention_factor(told)}
    names = STRETCHES[kind].items()
    return {"kind": kind, **found} | {ours: told[theirs] for ours, theirs in names if told.get(theirs) is not None}


def _attention_factor(told: Mapping[str, Any]) -> float | None:
    """YaRN's, where files state it by two factors on its logarithm (DeepSeek-V2, 2024)."""
    if not (told.get("mscale") and told.get("mscale_all_dim")):
        return None
    above, below = (0.1 * told[scale] * math.log(told["factor"]) + 1.0 for scale in ("mscale", "mscale_all_dim"))
    return above / below


def rope_settings(rope: config.Rope) -> Settings:
    """The same back, under the names that every version of transformers reads."""
    share = {} if rope.share == 1 else {"partial_rotary_factor": rope.share}
    return {"rope_theta": rope.theta, "rope_scaling": _stretch(rope) or None, **share}


def rope_parameters(rope: config.Rope) -> Settings:
    """Those of one type of layer, where types differ."""
    return {"rope_type": "default", "rope_theta": rope.theta, **_stretch(rope)}


def _stretch(rope: config.Rope) -> Settings:
    names = STRETCHES.get(rope.kind.value, {}).items()
    told = {theirs: getattr(rope, ours) for ours, theirs in names if getattr(rope, ours) is not None}
    return {"rope_type": rope.kind.value, **told} if told else {}
