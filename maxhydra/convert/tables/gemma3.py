"""Gemma 3 (2025), its text part: five layers with windows to one without, each with wavelengths of their own."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import FULL, WINDOWED, arranged, by_type, layer_types
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.settings import (
    head,
    rope_of,
    rope_parameters,
    sizes,
)
from maxhydra.convert.tables import gemma, gemma2, llama

# What the published files leave out.
USUAL = {
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
    settings = {**USUAL, **settings}
    told = settings.get("rope_parameters") or {FULL: settings.get("rope_scaling")}
    layer = gemma2.sandwich(settings)
    attention = {**layer["attention"], "qk_norm": "head"}
    local = {
        **attention,
        "window": settings["sliding_window"],
        "rope": rope_of(told.get(WINDOWED) or {}, {"rope_theta": settings["rope_local_base_freq"]}),
    }
    everywhere = {**attention, "rope": rope_of(told.get(FULL) or {}, settings)}
    types = layer_types(settings, every=settings["sliding_window_pattern"])
    return {
        **sizes(settings),
        **gemma.SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings.get("final_logit_softcapping"),
        **arranged(types, windowed={**layer, "attention": local}, full={**layer, "attention": everywhere}),
    }


def to_settings(model: config.Model) -> Settings | None:
    ropes = {name: rope_parameters(kind.attention.rope) for name, kind in by_type(model).items()}
    return {**gemma2.sandwich_settings(model), "rope_parameters": ropes}


TABLE = Table(
    hf_types={"gemma3_text": "Gemma3ForCausalLM"},
    layer=gemma2.LAYER + llama.QK_NORMS,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
