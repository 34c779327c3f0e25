"""Qwen3 (2025): Llama with norms of queries and keys."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import layer_kinds
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama, qwen2


def to_model(settings: Settings) -> dict[str, Any]:
    found = llama.to_model({"head_dim": 128, **settings})
    bias = "all" if settings.get("attention_bias") else "none"
    found["kinds"]["layer"]["attention"] |= {"qk_norm": "head", "bias": bias}
    return qwen2.windowed(settings, found)


def to_settings(model: config.Model) -> Settings | None:
    settings = qwen2.to_settings(model)
    assert settings is not None
    bias = layer_kinds(model)[0].attention.bias
    return {**settings, "attention_bias": bias is config.AttentionBias.all}


TABLE = Table(
    hf_types={"qwen3": "Qwen3ForCausalLM"},
    layer=llama.LAYER + llama.BIASES + llama.QK_NORMS,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
