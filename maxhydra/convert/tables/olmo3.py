"""OLMo 3 (2025): post-norms, QK norm over all heads, sliding windows in three of four layers."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    WINDOWED,
    activation,
    activation_setting,
    head,
    kind_by_type,
    layer_types,
    rope_from,
    rope_parameters,
    size_settings,
    sizes,
    window_settings,
    windowed_layers,
)
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama


def to_model(settings: Settings) -> dict[str, Any]:
    settings = {"rope_theta": 500_000.0, **settings}
    parameters = settings.get("rope_parameters") or {FULL: settings.get("rope_scaling")}
    bias = "all" if settings.get("attention_bias") else "none"
    attention = {"qk_norm": "whole", "bias": bias}
    ropes = {name: rope_from(parameters.get(name) or {}, settings) for name in (WINDOWED, FULL)}
    local = {**attention, "window": settings["sliding_window"], "rope": ropes[WINDOWED]}
    full = {**attention, "rope": ropes[FULL]}
    layer = {"norms": "post", "mlp": {"activation": activation(settings["hidden_act"])}}
    kinds = {"windowed": {**layer, "attention": local}, "full": {**layer, "attention": full}}
    return {
        **sizes(settings),
        "head": head(settings, tied=False),
        **windowed_layers(layer_types(settings, every=4), **kinds),
    }


def to_settings(model: config.Model) -> Settings | None:
    kinds = kind_by_type(model)
    return {
        **size_settings(model),
        **window_settings(model),
        "rope_parameters": {name: rope_parameters(kind.attention.rope) for name, kind in kinds.items()},
        "hidden_act": activation_setting(kinds[FULL].mlp.activation),
        "attention_bias": kinds[FULL].attention.bias is config.AttentionBias.all,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


TABLE = Table(
    hf_types={"olmo3": "Olmo3ForCausalLM"},
    layer=llama.BODY + llama.POST_NORMS + llama.QK_NORMS + llama.BIASES,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
