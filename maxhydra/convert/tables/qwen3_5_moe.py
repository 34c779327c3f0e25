"""Qwen3.5 (Qwen Team, 2026) with an MoE in every layer, text."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import layer_kinds
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama, qwen3_5, qwen3_next
from maxhydra.convert.tables.qwen3_next import MIXERS


def to_model(settings: Settings) -> dict[str, Any]:
    """Every layer is an MoE, so config.json has no intermediate_size; fill it with the size of an expert."""
    types = qwen3_next.mixers(settings)
    kinds = {MIXERS[name]: qwen3_next.kind(settings, name, qwen3_next.moe(settings)) for name in types}
    filled = {"intermediate_size": settings["moe_intermediate_size"], **settings}
    return qwen3_next.model_values(filled, kinds, [MIXERS[name] for name in types])


def to_settings(model: config.Model) -> Settings | None:
    return {**qwen3_next.common_settings(model), **qwen3_next.moe_settings(layer_kinds(model)[0])}


TABLE = Table(
    hf_types={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    layer=(*qwen3_5.LAYER, *qwen3_next.MOE),
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
)
