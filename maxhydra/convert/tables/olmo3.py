"""OLMo 3 (2025): norms behind attention and feed-forward, norms of whole queries and keys, windows in three of four."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import FULL, WINDOWED, arranged, by_type, layer_types, window_settings
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.settings import (
    activation,
    activation_setting,
    head,
    rope_of,
    rope_parameters,
    size_settings,
    sizes,
)
from maxhydra.convert.tables import llama


def to_model(settings: Settings) -> dict[str, Any]:
    settings = {"rope_theta": 500_000.0, **settings}
    told = settings.get("rope_parameters") or {FULL: settings.get("rope_scaling")}
    bias = "all" if settings.get("attention_bias") else "none"
    attention = {"qk_norm": "whole", "bias": bias}
    ropes = {name: rope_of(told.get(name) or {}, settings) for name in (WINDOWED, FULL)}
    local = {**attention, "window": settings["sliding_window"], "rope": ropes[WINDOWED]}
    everywhere = {**attention, "rope": ropes[FULL]}
    layer = {"norms": "post", "mlp": {"activation": activation(settings["hidden_act"])}}
    kinds = {"windowed": {**layer, "attention": local}, "full": {**layer, "attention": everywhere}}
    return {
        **sizes(settings),
        "head": head(settings, tied=False),
        **arranged(layer_types(settings, every=4), **kinds),
    }


def to_settings(model: config.Model) -> Settings | None:
    kinds = by_type(model)
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
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
