"""Qwen3 (2025): Llama with QK norms."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import layer_kinds
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama, qwen2


def to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model({"head_dim": 128, **settings})
    bias = "all" if settings.get("attention_bias") else "none"
    values["kinds"]["layer"]["attention"] |= {"qk_norm": "head", "bias": bias}
    return qwen2.add_windows(settings, values)


def to_settings(model: config.Model) -> Settings | None:
    settings = qwen2.to_settings(model)
    assert settings is not None
    bias = layer_kinds(model)[0].attention.bias
    return {**settings, "attention_bias": bias is config.AttentionBias.all}


TABLE = Table(
    hf_types={"qwen3": "Qwen3ForCausalLM"},
    layer=llama.LAYER + llama.BIASES + llama.QK_NORMS,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
