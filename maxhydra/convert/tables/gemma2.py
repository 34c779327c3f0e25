"""Gemma 2 (2024): windows in every other layer, norms on both sides, soft-caps."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import arranged, layer_kinds, layer_types, window_settings
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.settings import (
    activation,
    activation_setting,
    head,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.tables import gemma, llama

LAYER = (
    Weight("attention_norm/scale", llama.HF + "input_layernorm.weight"),
    Weight("mlp_norm/scale", llama.HF + "pre_feedforward_layernorm.weight"),
    *llama.BODY,
    *llama.POST_NORMS,
    *llama.BIASES,
)


def sandwich(settings: Settings) -> dict[str, Any]:
    """What all layers have in common."""
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


def sandwich_settings(model: config.Model) -> Settings:
    """The same back, with what stands at the model's top."""
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
    layer = sandwich(settings)
    layer["attention"]["rope"] = rope(settings)
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    return {
        **sizes(settings),
        **gemma.SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings["final_logit_softcapping"],
        **arranged(layer_types(settings, every=2), windowed=local, full=layer),
    }


def to_settings(model: config.Model) -> Settings | None:
    return {**sandwich_settings(model), **rope_settings(layer_kinds(model)[0].attention.rope)}


TABLE = Table(
    hf_types={"gemma2": "Gemma2ForCausalLM"},
    layer=LAYER,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
