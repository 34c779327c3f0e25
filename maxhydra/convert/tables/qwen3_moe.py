"""Qwen3 MoE (Qwen Team, 2025): 30B-A3B, 235B-A22B, and Qwen3-Coder 480B-A35B."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError
from maxhydra.convert.tables import llama

LAYER = (*llama.LAYER, *llama.QK_NORMS, *llama.EXPERTS)


def to_model(settings: Settings) -> dict[str, Any]:
    if settings.get("attention_bias") or settings.get("use_sliding_window"):
        raise UnsupportedError("unsupported attention_bias or use_sliding_window, which no published model uses")
    dense, step = settings.get("mlp_only_layers") or (), settings.get("decoder_sparse_step", 1)
    function = activation(settings["hidden_act"])
    moe = {
        "experts": settings.get("num_experts") or settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": settings["moe_intermediate_size"],
        "activation": function,
        "router": {"normalize": settings.get("norm_topk_prob", False)},
    }
    attention = {"qk_norm": "head", "rope": rope(settings)}
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


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    mixture = next((kind for kind in kinds if kind.feed_forward is config.FeedForward.moe), None)
    if mixture is None:
        return None
    return {
        **size_settings(model),
        **rope_settings(mixture.attention.rope),
        "hidden_act": activation_setting(mixture.moe.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        "num_experts": mixture.moe.experts,
        "num_experts_per_tok": mixture.moe.top_k,
        "moe_intermediate_size": mixture.moe.dim or model.mlp_dim,
        "norm_topk_prob": mixture.moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind.feed_forward is config.FeedForward.mlp],
    }


TABLE = Table(
    hf_types={"qwen3_moe": "Qwen3MoeForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
