"""Gemma 2 (2024): sliding windows in every other layer, pre- and post-norms, logit soft-capping."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    activation,
    activation_setting,
    head,
    layer_kinds,
    layer_types,
    rope,
    rope_settings,
    size_settings,
    sizes,
    window_settings,
    windowed_layers,
)
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import gemma, llama

LAYER = (
    Weight("attention_norm/scale", llama.HF + "input_layernorm.weight"),
    Weight("mlp_norm/scale", llama.HF + "pre_feedforward_layernorm.weight"),
    *llama.BODY,
    *llama.POST_NORMS,
    *llama.BIASES,
)


def layer_values(settings: Settings) -> dict[str, Any]:
    """Values of a layer kind, without RoPE and window."""
    attention = {
        "scale": float(settings["query_pre_attn_scalar"]) ** -0.5,
        "softcap": settings.get("attn_logit_softcapping"),
        "bias": "all" if settings.get("attention_bias") else "none",
    }
    return {
        "norms": "sandwich",
        "attention": attention,
        "mlp": {"activation": activation(settings.get("hidden_activation", "gelu_pytorch_tanh"))},
    }


def common_settings(model: config.Model) -> Settings:
    """Settings shared with Gemma 3 and without RoPE: those of `layer_values` and the sizes."""
    kind = layer_kinds(model)[0]
    scale = kind.attention.scale
    return {
        **size_settings(model),
        **window_settings(model),
        "query_pre_attn_scalar": model.head_dim if scale is None else round(scale**-2),
        "attn_logit_softcapping": kind.attention.softcap,
        "final_logit_softcapping": model.logit_softcap,
        "attention_bias": kind.attention.bias is config.AttentionBias.all,
        "hidden_activation": activation_setting(kind.mlp.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
    }


def to_model(settings: Settings) -> dict[str, Any]:
    settings = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **settings}
    layer = layer_values(settings)
    layer["attention"]["rope"] = rope(settings)
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    return {
        **sizes(settings),
        **gemma.SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings["final_logit_softcapping"],
        **windowed_layers(layer_types(settings, every=2), windowed=local, full=layer),
    }


def to_settings(model: config.Model) -> Settings | None:
    return {**common_settings(model), **rope_settings(layer_kinds(model)[0].attention.rope)}


TABLE = Table(
    hf_types={"gemma2": "Gemma2ForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
