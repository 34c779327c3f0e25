"""SmolLM3 (Bakouch et al., 2025): Llama's tensor names; every fourth layer has no RoPE."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    WINDOWED,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    rope,
    rope_settings,
    rotated_layers,
    size_settings,
    sizes,
    window_settings,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError
from maxhydra.convert.tables import llama


def to_model(settings: Settings) -> dict[str, Any]:
    has_rope = rotated_layers(settings)
    windows = _windows(settings, has_rope)
    attention = {"bias": "all" if settings.get("attention_bias") else "none"}
    mlp = {"activation": activation(settings.get("hidden_act", "silu")), "bias": bool(settings.get("mlp_bias"))}
    ropes = {True: rope({"rope_theta": 2_000_000.0, **settings}), False: {"kind": "none"}}
    names, kinds = [], {}
    for is_rotated, window in zip(has_rope, windows, strict=True):
        name = f"{'rope' if is_rotated else 'nope'}{'' if window is None else '_local'}"
        kinds[name] = {"attention": {**attention, "window": window, "rope": ropes[is_rotated]}, "mlp": mlp}
        names.append(name)
    return {**sizes(settings), "head": head(settings, tied=True), "kinds": kinds, "pattern": pattern_of(names)}


def _windows(settings: Settings, has_rope: list[bool]) -> list[int | None]:
    """Sliding window of each layer; by default those without RoPE have it, if any."""
    window = settings.get("sliding_window")
    is_used = bool(settings.get("use_sliding_window")) and window is not None
    default = [WINDOWED if is_used and not is_rotated else FULL for is_rotated in has_rope]
    types = settings.get("layer_types") or default
    if WINDOWED in types and not is_used:
        raise UnsupportedError(f"layer_types with {WINDOWED}, but use_sliding_window=false or sliding_window=null")
    if len(types) != len(has_rope) or not {*types} <= {WINDOWED, FULL}:
        raise UnsupportedError(f"unsupported layer_types (supported: {WINDOWED} or {FULL} for each layer)")
    return [window if name == WINDOWED else None for name in types]


def to_settings(model: config.Model) -> Settings | None:
    kinds, windows = layer_kinds(model), window_settings(model)
    has_rope = [kind.attention.rope.kind is not config.RopeKind.none for kind in kinds]
    rotated = kinds[has_rope.index(True)] if any(has_rope) else kinds[0]
    return {
        **size_settings(model),
        **rope_settings(rotated.attention.rope),
        **windows,
        "use_sliding_window": windows["sliding_window"] is not None,
        "no_rope_layers": [int(is_rotated) for is_rotated in has_rope],
        "hidden_act": activation_setting(kinds[0].mlp.activation),
        "attention_bias": kinds[0].attention.bias is config.AttentionBias.all,
        "mlp_bias": kinds[0].mlp.bias,
        "tie_word_embeddings": model.head is config.Head.tied,
        # transformers' default is a token that smaller vocabularies do not have.
        "pad_token_id": None,
    }


TABLE = Table(
    hf_types={"smollm3": "SmolLM3ForCausalLM"},
    layer=llama.TABLE.layer,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
