"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, leading dense layers, then experts by a softmax over all."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import layer_kinds
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.settings import activation, activation_setting, head, rope, rope_settings, size_settings, sizes
from maxhydra.convert.tables import llama

HF = llama.HF
ATTENTION, SHARED = HF + "self_attn.", HF + "mlp.shared_experts."
LAYER = (
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


def to_model(settings: Settings) -> dict[str, Any]:
    if settings.get("norm_topk_prob"):
        raise UnsupportedError("norm_topk_prob=true, which no published model has")
    method = settings.get("topk_method") or "greedy"
    if method not in METHODS:
        raise UnsupportedError(f"topk_method={method}, where {', '.join(METHODS)} are served")
    router = {"normalize": False, "scale": float(settings.get("routed_scaling_factor", 1.0))}
    if method == "group_limited_greedy":
        router |= {"groups": settings["n_group"], "top_groups": settings["topk_group"]}
    return arranged(settings, latent(settings), router)


def to_settings(model: config.Model) -> Settings | None:
    mixture = mixture_of(model)
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


def latent(settings: Settings, *, neighbours: bool = True) -> dict[str, Any]:
    """Attention."""
    if settings.get("attention_bias"):
        raise UnsupportedError("attention_bias=true, which no published model has")
    turned = rope(settings)
    told = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    mscale = told.get("mscale_all_dim") if turned.get("kind") == "yarn" else None
    return {
        "q_lora_rank": settings.get("q_lora_rank"),
        "kv_lora_rank": settings["kv_lora_rank"],
        "qk_nope_head_dim": settings["qk_nope_head_dim"],
        "qk_rope_head_dim": settings["qk_rope_head_dim"],
        "v_head_dim": settings["v_head_dim"],
        "mscale": mscale or None,
        "rope": {**turned, "pairs": "neighbours" if neighbours else "halves"},
    }


def arranged(settings: Settings, mla: dict[str, Any], router: dict[str, Any]) -> dict[str, Any]:
    """The model of such attention and such a router: dense layers first, then experts."""
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
    dense = min(settings.get("first_k_dense_replace", 0), settings["num_hidden_layers"])
    kinds: dict[str, Any] = {"layer": {"mixer": "mla", "mla": mla, "feed_forward": "moe", "moe": moe}}
    if dense:
        kinds["dense"] = {"mixer": "mla", "mla": mla, "mlp": {"activation": function}}
    own = sizes({**settings, "head_dim": settings["qk_nope_head_dim"]})
    return {**own, "head": head(settings, tied=False), "prefix": ["dense"] * dense, "kinds": kinds}


def mixture_of(model: config.Model) -> config.Kind | None:
    """The kind of the layers behind the dense ones, where it is of this family."""
    last = layer_kinds(model)[-1]
    is_ours = last.mixer is config.Mixer.mla and last.feed_forward is config.FeedForward.moe
    return last if is_ours else None


def shared_settings(model: config.Model, mixture: config.Kind) -> Settings:
    """What all generations of the family tell alike."""
    mla, moe = mixture.mla, mixture.moe
    dim = moe.dim or model.mlp_dim
    found = rope_settings(mla.rope)
    if mla.mscale is not None:
        found["rope_scaling"] = {**found["rope_scaling"], "mscale": mla.mscale, "mscale_all_dim": mla.mscale}
    kinds = layer_kinds(model)
    return {
        **size_settings(model),
        **found,
        "head_dim": mla.qk_rope_head_dim,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim or model.head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim or model.head_dim,
        "hidden_act": activation_setting(moe.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": dim,
        "n_shared_experts": (moe.shared.dim or 0) // dim,
        "routed_scaling_factor": moe.router.scale,
        "first_k_dense_replace": sum(kind.feed_forward is config.FeedForward.mlp for kind in kinds),
    }


TABLE = Table(
    hf_types={"deepseek_v2": "DeepseekV2ForCausalLM"},
    layer=LAYER,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
