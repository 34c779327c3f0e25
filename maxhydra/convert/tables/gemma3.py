"""Gemma 3 (2025), text: five sliding-window layers per full-attention layer, each type with its own RoPE."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    WINDOWED,
    head,
    kind_by_type,
    layer_types,
    rope_from,
    rope_parameters,
    sizes,
    windowed_layers,
)
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import gemma, gemma2, llama

# Defaults of keys that the published files omit.
DEFAULTS = {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
}


def to_model(settings: Settings) -> dict[str, Any]:
    settings = {**DEFAULTS, **settings}
    ropes = settings.get("rope_parameters") or {FULL: settings.get("rope_scaling")}
    layer = gemma2.layer_values(settings)
    attention = {**layer["attention"], "qk_norm": "head"}
    local = {
        **attention,
        "window": settings["sliding_window"],
        "rope": rope_from(ropes.get(WINDOWED) or {}, {"rope_theta": settings["rope_local_base_freq"]}),
    }
    full = {**attention, "rope": rope_from(ropes.get(FULL) or {}, settings)}
    types = layer_types(settings, every=settings["sliding_window_pattern"])
    return {
        **sizes(settings),
        **gemma.SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings.get("final_logit_softcapping"),
        **windowed_layers(types, windowed={**layer, "attention": local}, full={**layer, "attention": full}),
    }


def to_settings(model: config.Model) -> Settings | None:
    ropes = {name: rope_parameters(kind.attention.rope) for name, kind in kind_by_type(model).items()}
    return {**gemma2.common_settings(model), "rope_parameters": ropes}


TABLE = Table(
    hf_types={"gemma3_text": "Gemma3ForCausalLM"},
    layer=gemma2.LAYER + llama.QK_NORMS,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
