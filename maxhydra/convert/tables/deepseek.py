"""DeepSeek-V2, V3, R1, V3.2 (DeepSeek-AI, 2024 and 2025), Kimi K2 (Moonshot AI, 2025) and GLM-4.7-Flash (2026).

V2: MLA, leading dense layers, then MoE layers with a softmax router. V3, R1, Kimi K2, GLM-4.7-Flash: sigmoid router,
aux-loss-free balancing. V3.2: V3 with an indexer that selects the keys of sparse attention.

MTP layers are numbered after the last decoder layer; transformers skips them, and so does a model with mtp.depth=0.
"""

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
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

DEEPSEEK_V2_HF = llama.HF
ATTENTION, SHARED = DEEPSEEK_V2_HF + "self_attn.", DEEPSEEK_V2_HF + "mlp.shared_experts."
DEEPSEEK_V2_LAYER = (
    *(row for row in llama.LAYER if not row.paths[0].startswith("attention/")),
    Weight("attention/query/kernel", ATTENTION + "q_proj.weight"),
    Weight("attention/query_down/kernel", ATTENTION + "q_a_proj.weight"),
    Weight("attention/query_norm/scale", ATTENTION + "q_a_layernorm.weight"),
    Weight("attention/query_up/kernel", ATTENTION + "q_b_proj.weight"),
    Weight("attention/latent/kernel", ATTENTION + "kv_a_proj_with_mqa.weight"),
    Weight("attention/latent_norm/scale", ATTENTION + "kv_a_layernorm.weight"),
    Weight("attention/key_value/kernel", ATTENTION + "kv_b_proj.weight"),
    Weight("attention/out/kernel", ATTENTION + "o_proj.weight", inputs=2),
    *llama.EXPERTS,
    *(Weight(f"mlp/shared/{name}/kernel", SHARED + f"{name}_proj.weight") for name in ("gate", "up", "down")),
)
METHODS = ("greedy", "group_limited_greedy")


def deepseek_v2_to_model(settings: Settings) -> dict[str, Any]:
    if settings.get("norm_topk_prob"):
        raise UnsupportedError("unsupported norm_topk_prob=true, which no published model uses")
    method = settings.get("topk_method") or "greedy"
    if method not in METHODS:
        raise UnsupportedError(f"unsupported topk_method={method} (supported: {', '.join(METHODS)})")
    router = {"normalize": False, "scale": float(settings.get("routed_scaling_factor", 1.0))}
    if method == "group_limited_greedy":
        router |= {"groups": settings["n_group"], "top_groups": settings["topk_group"]}
    return model_values(settings, mla_values(settings), router)


def deepseek_v2_to_settings(model: config.Model) -> Settings | None:
    mixture = moe_kind(model)
    if mixture is None:
        return None
    router = mixture.moe.router
    is_grouped = router.groups > 1
    return {
        **shared_settings(model, mixture),
        "norm_topk_prob": router.normalize,
        "topk_method": "group_limited_greedy" if is_grouped else "greedy",
        "n_group": router.groups if is_grouped else None,
        "topk_group": router.top_groups if is_grouped else None,
    }


def mla_values(settings: Settings, *, interleaved_rope: bool = True) -> dict[str, Any]:
    """Values of `model.kinds.*.mla`."""
    if settings.get("attention_bias"):
        raise UnsupportedError("unsupported attention_bias=true, which no published model uses")
    rope_values = rope(settings)
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    mscale = parameters.get("mscale_all_dim") if rope_values.get("kind") == "yarn" else None
    return {
        "q_lora_rank": settings.get("q_lora_rank"),
        "kv_lora_rank": settings["kv_lora_rank"],
        "qk_nope_head_dim": settings["qk_nope_head_dim"],
        "qk_rope_head_dim": settings["qk_rope_head_dim"],
        "v_head_dim": settings["v_head_dim"],
        "mscale": mscale or None,
        "rope": {**rope_values, "pairs": "neighbours" if interleaved_rope else "halves"},
    }


def model_values(settings: Settings, mla: dict[str, Any], router: dict[str, Any]) -> dict[str, Any]:
    """Values of `model`: layers with this attention, experts and router."""
    model_sizes = sizes({**settings, "head_dim": settings["qk_nope_head_dim"]})
    layers = expert_layers(settings, {"mixer": "mla", "mla": mla}, router)
    return {**model_sizes, "head": head(settings, tied=False), **layers}


def expert_layers(settings: Settings, mixer: dict[str, Any], router: dict[str, Any]) -> dict[str, Any]:
    """Values of `model.prefix` and `model.kinds`: leading dense layers, then MoE layers, all with this mixer."""
    function = activation(settings.get("hidden_act", "silu"))
    dim = settings["moe_intermediate_size"]
    moe = {
        "experts": settings["n_routed_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": dim,
        "activation": function,
        "router": router,
        "shared": {"dim": dim * settings["n_shared_experts"]} if settings.get("n_shared_experts") else {},
    }
    dense = min(settings.get("first_k_dense_replace") or 0, settings["num_hidden_layers"])
    kinds: dict[str, Any] = {"layer": {**mixer, "feed_forward": "moe", "moe": moe}}
    if dense:
        kinds["dense"] = {**mixer, "mlp": {"activation": function}}
    return {"prefix": ["dense"] * dense, "kinds": kinds}


def moe_kind(model: config.Model) -> config.Kind | None:
    """The kind of the MoE layers; None if the model is not of this family."""
    last = layer_kinds(model)[-1]
    is_family = last.mixer is config.Mixer.mla and last.feed_forward is config.FeedForward.moe
    return last if is_family else None


def shared_settings(model: config.Model, mixture: config.Kind) -> Settings:
    """Settings common to all generations of the family."""
    mla = mixture.mla
    rope_keys = rope_settings(mla.rope)
    if mla.mscale is not None:
        rope_keys["rope_scaling"] = {
            **rope_keys["rope_scaling"],
            "mscale": mla.mscale,
            "mscale_all_dim": mla.mscale,
        }
    return {
        **size_settings(model),
        **rope_keys,
        "head_dim": mla.qk_rope_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim or model.head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim or model.head_dim,
        "tie_word_embeddings": model.head is config.Head.tied,
        **expert_settings(model, mixture),
    }


def expert_settings(model: config.Model, mixture: config.Kind) -> Settings:
    """Inverse of `expert_layers`, for the MoE layers and the number of dense ones."""
    moe = mixture.moe
    dim = moe.dim or model.mlp_dim
    return {
        "hidden_act": activation_setting(moe.activation),
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": dim,
        "n_shared_experts": (moe.shared.dim or 0) // dim,
        "routed_scaling_factor": moe.router.scale,
        "first_k_dense_replace": sum(kind.feed_forward is config.FeedForward.mlp for kind in layer_kinds(model)),
    }


DEEPSEEK_V2 = Table(
    hf_types={"deepseek_v2": "DeepseekV2ForCausalLM"},
    layer=DEEPSEEK_V2_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=deepseek_v2_to_model,
    to_settings=deepseek_v2_to_settings,
)


DEEPSEEK_V3_HF = llama.HF
DEEPSEEK_V3_LAYER = (
    *DEEPSEEK_V2_LAYER,
    Weight("mlp/router/correction", DEEPSEEK_V3_HF + "mlp.gate.e_score_correction_bias"),
    Weight("embedding_norm/scale", DEEPSEEK_V3_HF + "enorm.weight"),
    Weight("hidden_norm/scale", DEEPSEEK_V3_HF + "hnorm.weight"),
    Weight("join/kernel", DEEPSEEK_V3_HF + "eh_proj.weight"),
    Weight("norm/scale", DEEPSEEK_V3_HF + "shared_head.norm.weight"),
)
# The MTP layer, and its copies of the embedding and the head.
IGNORED = ("*.rotary_emb.inv_freq", "model.layers.{beyond}.*", "*.embed_tokens.weight", "*.shared_head.head.weight")


def deepseek_v3_to_model(settings: Settings) -> dict[str, Any]:
    mla = mla_values(settings, interleaved_rope=settings.get("rope_interleave", True))
    return model_values(with_dense_layers(settings), mla, router(settings))


def router(settings: Settings) -> dict[str, Any]:
    return {
        "scores": "sigmoid",
        "normalize": settings.get("norm_topk_prob", True),
        "scale": float(settings.get("routed_scaling_factor", 1.0)),
        "groups": 1 if settings.get("n_group") is None else settings["n_group"],
        "top_groups": 1 if settings.get("topk_group") is None else settings["topk_group"],
        "group_score": "top2_sum",
        "bias_rate": 0.001,
    }


def router_settings(router: config.Router) -> Settings:
    """Inverse of `router`, without its scale."""
    return {"norm_topk_prob": router.normalize, "n_group": router.groups, "topk_group": router.top_groups}


def deepseek_v3_to_settings(model: config.Model) -> Settings | None:
    mixture = moe_kind(model)
    if mixture is None:
        return None
    return {
        **shared_settings(model, mixture),
        "rope_interleave": mixture.mla.rope.pairs is config.Pairs.neighbours,
        **router_settings(mixture.moe.router),
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": model.mtp.depth,
    }


DEEPSEEK_V3 = Table(
    hf_types={
        "deepseek_v3": "DeepseekV3ForCausalLM",
        "kimi_k2": "DeepseekV3ForCausalLM",
        "glm4_moe_lite": "Glm4MoeLiteForCausalLM",
    },
    layer=DEEPSEEK_V3_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=deepseek_v3_to_model,
    to_settings=deepseek_v3_to_settings,
    ignored=IGNORED,
)


INDEXER = llama.HF + "self_attn.indexer."
DEEPSEEK_V32_LAYER = (
    *DEEPSEEK_V3_LAYER,
    Weight("attention/indexer/query/kernel", INDEXER + "wq_b.weight"),
    Weight("attention/indexer/key/kernel", INDEXER + "wk.weight"),
    Weight("attention/indexer/key_norm/scale", INDEXER + "k_norm.weight"),
    Weight("attention/indexer/key_norm/bias", INDEXER + "k_norm.bias"),
    Weight("attention/indexer/weight/kernel", INDEXER + "weights_proj.weight"),
)


def deepseek_v32_to_model(settings: Settings) -> dict[str, Any]:
    mla = {**mla_values(settings), "indexer": indexer_values(settings)}
    return model_values(with_dense_layers(settings), mla, router(settings))


def indexer_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.kinds.*.mla.indexer`."""
    return {
        "top_k": settings["index_topk"],
        "num_heads": settings["index_n_heads"],
        "head_dim": settings["index_head_dim"],
    }


def with_dense_layers(settings: Settings) -> Settings:
    """The settings with the number of dense layers, which newer files give as mlp_layer_types."""
    types = settings.get("mlp_layer_types")
    if not types:
        return settings
    dense = types.count("dense")
    if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
        raise UnsupportedError("unsupported order of mlp_layer_types (supported: dense layers before sparse ones)")
    return {**settings, "first_k_dense_replace": dense}


def deepseek_v32_to_settings(model: config.Model) -> Settings | None:
    settings = deepseek_v3_to_settings(model)
    indexers = [kind.mla.indexer for kind in layer_kinds(model) if kind.mla.indexer.top_k is not None]
    if settings is None or not indexers:
        return None
    indexer = indexers[-1]
    index_settings = {
        "index_topk": indexer.top_k,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
    }
    return {**settings, **index_settings}


DEEPSEEK_V32 = Table(
    hf_types={"deepseek_v32": "DeepseekV32ForCausalLM"},
    layer=DEEPSEEK_V32_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=deepseek_v32_to_model,
    to_settings=deepseek_v32_to_settings,
    ignored=IGNORED,
)

TABLES = (DEEPSEEK_V2, DEEPSEEK_V3, DEEPSEEK_V32)
