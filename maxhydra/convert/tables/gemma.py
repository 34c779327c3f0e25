"""Gemma (2024), Gemma 2 (2024) and Gemma 3 (2025), text.

Gemma: Llama's tensor names; norm scales stored minus one, embeddings scaled by sqrt(emb_dim). Gemma 2: sliding windows
in every other layer, pre- and post-norms, logit soft-capping. Gemma 3: five sliding-window layers per full-attention
layer, each type with its own RoPE.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    WINDOWED,
    activation,
    activation_setting,
    head,
    kind_by_type,
    layer_kinds,
    layer_types,
    rope,
    rope_from,
    rope_parameters,
    rope_settings,
    size_settings,
    sizes,
    window_settings,
    windowed_layers,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

GEMMA_SHARED = {"norm": "rms_plus_one", "embedding": {"scale": "root_dim"}}


def gemma_to_model(settings: Settings) -> dict[str, Any]:
    # The first published files say gelu but use the tanh approximation.
    name = settings.get("hidden_activation") or settings["hidden_act"]
    function = "gelu_tanh" if name == "gelu" else activation(name)
    bias = "all" if settings.get("attention_bias") else "none"
    layer = {"attention": {"rope": rope(settings), "bias": bias}, "mlp": {"activation": function}}
    return {**sizes(settings), **GEMMA_SHARED, "head": head(settings, tied=True), "kinds": {"layer": layer}}


def gemma_to_settings(model: config.Model) -> Settings | None:
    kind = layer_kinds(model)[0]
    return {
        **size_settings(model),
        **rope_settings(kind.attention.rope),
        "hidden_act": activation_setting(kind.mlp.activation),
        "attention_bias": kind.attention.bias is config.AttentionBias.all,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


GEMMA = Table(
    hf_types={"gemma": "GemmaForCausalLM"},
    layer=llama.LAYER + llama.BIASES,
    non_layer=llama.NON_LAYER,
    to_model=gemma_to_model,
    to_settings=gemma_to_settings,
)


GEMMA2_LAYER = (
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


def gemma2_to_model(settings: Settings) -> dict[str, Any]:
    settings = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, **settings}
    layer = layer_values(settings)
    layer["attention"]["rope"] = rope(settings)
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    return {
        **sizes(settings),
        **GEMMA_SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings["final_logit_softcapping"],
        **windowed_layers(layer_types(settings, every=2), windowed=local, full=layer),
    }


def gemma2_to_settings(model: config.Model) -> Settings | None:
    return {**common_settings(model), **rope_settings(layer_kinds(model)[0].attention.rope)}


GEMMA2 = Table(
    hf_types={"gemma2": "Gemma2ForCausalLM"},
    layer=GEMMA2_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=gemma2_to_model,
    to_settings=gemma2_to_settings,
)


# Defaults of keys that the published files omit.
GEMMA3_DEFAULTS = {
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


def gemma3_to_model(settings: Settings) -> dict[str, Any]:
    settings = {**GEMMA3_DEFAULTS, **settings}
    if (softcap := settings.get("attn_logit_softcapping")) is not None:
        raise UnsupportedError(f"unsupported attn_logit_softcapping={softcap} (supported: null)")
    ropes = settings.get("rope_parameters") or {FULL: settings.get("rope_scaling")}
    layer = layer_values(settings)
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
        **GEMMA_SHARED,
        "head": head(settings, tied=True),
        "logit_softcap": settings.get("final_logit_softcapping"),
        **windowed_layers(types, windowed={**layer, "attention": local}, full={**layer, "attention": full}),
    }


def gemma3_to_settings(model: config.Model) -> Settings | None:
    ropes = {name: rope_parameters(kind.attention.rope) for name, kind in kind_by_type(model).items()}
    return {**common_settings(model), "rope_parameters": ropes}


GEMMA3 = Table(
    hf_types={"gemma3_text": "Gemma3ForCausalLM"},
    layer=GEMMA2_LAYER + llama.QK_NORMS,
    non_layer=llama.NON_LAYER,
    to_model=gemma3_to_model,
    to_settings=gemma3_to_settings,
)

TABLES = (GEMMA, GEMMA2, GEMMA3)
