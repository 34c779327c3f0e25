"""Qwen2, Qwen2.5 (2024), Qwen3 and Qwen3 MoE (Qwen Team, 2025).

Qwen2: Llama with query, key and value biases; the last layers may have sliding windows. Qwen3: Llama with QK norms.
Qwen3 MoE: 30B-A3B, 235B-A22B, and Qwen3-Coder 480B-A35B.
"""

import dataclasses
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    WINDOWED,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    rope,
    rope_settings,
    size_settings,
    sizes,
    window_settings,
    windowed_layers,
)
from maxhydra.convert.name_table import Gguf, Settings, Table, Weight
from maxhydra.convert.tables import llama

# GGUF files of Qwen do not reorder queries and keys for RoPE on adjacent pairs.
LAYER = tuple(dataclasses.replace(row, gguf_interleaved_rope=False) for row in llama.LAYER)
GGUF_NAMES = {"query": "attn_q", "key": "attn_k", "value": "attn_v", "out": "attn_output"}
BIASES = tuple(
    dataclasses.replace(row, gguf=f"{llama.GGUF}{GGUF_NAMES[str(row.path).split('/')[1]]}.bias") for row in llama.BIASES
)
QK_NORMS = tuple(
    dataclasses.replace(row, gguf=f"{llama.GGUF}{name}_norm.weight")
    for row, name in zip(llama.QK_NORMS, ("attn_q", "attn_k"), strict=True)
)


def add_windows(settings: Settings, model: dict[str, Any]) -> dict[str, Any]:
    """Add sliding windows to the layers of a Llama-like model that use them."""
    if not settings.get("use_sliding_window"):
        return model
    layer = model["kinds"]["layer"]
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    first = settings.get("max_window_layers", 0)
    default_types = [FULL if layer < first else WINDOWED for layer in range(model["num_layers"])]
    types = settings.get("layer_types") or default_types
    return model | windowed_layers(types, windowed=local, full=layer)


def qwen2_to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model(settings)
    values["kinds"]["layer"]["attention"]["bias"] = "qkv"
    return add_windows(settings, values)


def qwen2_to_settings(model: config.Model) -> Settings | None:
    settings, windows = llama.to_settings(model), window_settings(model)
    assert settings is not None
    return {**settings, **windows, "use_sliding_window": windows["sliding_window"] is not None}


QWEN2 = Table(
    hf_types={"qwen2": "Qwen2ForCausalLM"},
    layer=LAYER + BIASES,
    non_layer=llama.NON_LAYER,
    to_model=qwen2_to_model,
    to_settings=qwen2_to_settings,
    gguf=Gguf(architectures=("qwen2",), settings=llama.GGUF_SETTINGS),
)


def qwen3_to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model({"head_dim": 128, **settings})
    bias = "all" if settings.get("attention_bias") else "none"
    values["kinds"]["layer"]["attention"] |= {"qk_norm": "head", "bias": bias}
    return add_windows(settings, values)


def qwen3_to_settings(model: config.Model) -> Settings | None:
    settings = qwen2_to_settings(model)
    assert settings is not None
    bias = layer_kinds(model)[0].attention.bias
    return {**settings, "attention_bias": bias is config.AttentionBias.all}


QWEN3 = Table(
    hf_types={"qwen3": "Qwen3ForCausalLM"},
    layer=LAYER + BIASES + QK_NORMS,
    non_layer=llama.NON_LAYER,
    gguf=Gguf(architectures=("qwen3",), settings=llama.GGUF_SETTINGS),
    to_model=qwen3_to_model,
    to_settings=qwen3_to_settings,
)


QWEN3_MOE_LAYER = (*llama.LAYER, *llama.BIASES, *llama.QK_NORMS, *llama.EXPERTS)


def qwen3_moe_to_model(settings: Settings) -> dict[str, Any]:
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step", 1)
    function = activation(settings["hidden_act"])
    moe = {
        "experts": settings.get("num_experts") or settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": settings["moe_intermediate_size"],
        "activation": function,
        "router": {"normalize": settings.get("norm_topk_prob", False)},
    }
    attention = {
        "qk_norm": "head",
        "rope": rope(settings),
        "bias": "all" if settings.get("attention_bias") else "none",
        "window": settings.get("sliding_window") if settings.get("use_sliding_window") else None,
    }
    kinds = {
        "layer": {"attention": attention, "feed_forward": "moe", "moe": moe},
        "dense": {"attention": attention, "mlp": {"activation": function}},
    }
    layers = range(settings["num_hidden_layers"])
    names = ["layer" if index not in dense and (index + 1) % step == 0 else "dense" for index in layers]
    return {
        **sizes(settings),
        "head": head(settings, tied=False),
        "kinds": {name: kinds[name] for name in dict.fromkeys(names)},
        "pattern": pattern_of(names),
    }


def qwen3_moe_to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    mixture = next((kind for kind in kinds if kind.feed_forward is config.FeedForward.moe), None)
    if mixture is None:
        return None
    return {
        **size_settings(model),
        **rope_settings(mixture.attention.rope),
        "attention_bias": mixture.attention.bias is config.AttentionBias.all,
        "use_sliding_window": mixture.attention.window is not None,
        "sliding_window": mixture.attention.window,
        "hidden_act": activation_setting(mixture.moe.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        "num_experts": mixture.moe.experts,
        "num_experts_per_tok": mixture.moe.top_k,
        "moe_intermediate_size": mixture.moe.dim or model.mlp_dim,
        "norm_topk_prob": mixture.moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind.feed_forward is config.FeedForward.mlp],
    }


QWEN3_MOE = Table(
    hf_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    layer=QWEN3_MOE_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=qwen3_moe_to_model,
    to_settings=qwen3_moe_to_settings,
)

# The text decoder of Qwen3-VL with experts: one tensor for all experts, [experts, inputs, outputs], and routing weights
# that are always normalized.
STACKED_EXPERTS = (
    Weight("mlp/router/kernel", llama.HF + "mlp.gate.weight"),
    Weight(
        ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
        llama.HF + "mlp.experts.gate_up_proj",
        leading=1,
        transposed=False,
    ),
    Weight("mlp/experts/down/kernel", llama.HF + "mlp.experts.down_proj", leading=1, transposed=False),
)
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_MOE,
    layer=(*llama.LAYER, *llama.BIASES, *llama.QK_NORMS, *STACKED_EXPERTS),
    to_model=lambda settings: qwen3_moe_to_model({**settings, "norm_topk_prob": True}),
)

TABLES = (QWEN2, QWEN3, QWEN3_MOE)
