"""Gemma (2024): Llama's tensor names; norm scales stored minus one, embeddings scaled by sqrt(emb_dim)."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    activation,
    activation_setting,
    head,
    layer_kinds,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama

SHARED = {"norm": "rms_plus_one", "embedding": {"scale": "root_dim"}}


def to_model(settings: Settings) -> dict[str, Any]:
    # The first published files say gelu but use the tanh approximation.
    name = settings.get("hidden_activation") or settings["hidden_act"]
    function = "gelu_tanh" if name == "gelu" else activation(name)
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
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
