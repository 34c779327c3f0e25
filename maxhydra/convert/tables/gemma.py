"""Gemma (2024): Llama's names; scales less one, and an embedding of unit variance."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import layer_kinds
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.settings import activation, activation_setting, head, rope, rope_settings, size_settings, sizes
from maxhydra.convert.tables import llama

SHARED = {"norm": "rms_plus_one", "embedding": {"scale": "root_dim"}}


def to_model(settings: Settings) -> dict[str, Any]:
    # The first files say gelu and mean its approximation.
    told = settings.get("hidden_activation") or settings["hidden_act"]
    function = "gelu_tanh" if told == "gelu" else activation(told)
    bias = "all" if settings.get("attention_bias") else "none"
    layer = {"attention": {"rope": rope(settings), "bias": bias}, "mlp": {"activation": function}}
    return {**sizes(settings), **SHARED, "head": head(settings, tied=True), "kinds": {"layer": layer}}


def to_settings(model: config.Model) -> Settings | None:
    kind = layer_kinds(model)[0]
    return {
        **size_settings(model),
        **rope_settings(kind.attention.rope),
        "hidden_act": activation_setting(kind.mlp.activation),
        "attention_bias": kind.attention.bias is config.AttentionBias.all,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


TABLE = Table(
    hf_types={"gemma": "GemmaForCausalLM"},
    layer=llama.LAYER + llama.BIASES,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
