"""DeepSeek-V3 and R1 (DeepSeek-AI, 2024), Kimi K2 (Moonshot AI, 2025): sigmoid router, aux-loss-free balancing.

MTP layers are numbered after the last decoder layer; transformers skips them, and so does a model with mtp.depth=0.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import deepseek_v2, llama

HF = llama.HF
LAYER = (
    *deepseek_v2.LAYER,
    Weight("mlp/router/correction", HF + "mlp.gate.e_score_correction_bias"),
    Weight("embedding_norm/scale", HF + "enorm.weight"),
    Weight("hidden_norm/scale", HF + "hnorm.weight"),
    Weight("join/kernel", HF + "eh_proj.weight"),
    Weight("norm/scale", HF + "shared_head.norm.weight"),
)
# The MTP layer, and its copies of the embedding and the head.
IGNORED = ("*.rotary_emb.inv_freq", "model.layers.{beyond}.*", "*.embed_tokens.weight", "*.shared_head.head.weight")


def to_model(settings: Settings) -> dict[str, Any]:
    mla = deepseek_v2.mla_values(settings, interleaved_rope=settings.get("rope_interleave", True))
    return deepseek_v2.model_values(settings, mla, router(settings))


def router(settings: Settings) -> dict[str, Any]:
    return {
        "scores": "sigmoid",
        "normalize": settings.get("norm_topk_prob", True),
        "scale": float(settings.get("routed_scaling_factor", 1.0)),
        "groups": settings.get("n_group") or 1,
        "top_groups": settings.get("topk_group") or 1,
        "group_score": "top2_sum",
        "bias_rate": 0.001,
    }


def to_settings(model: config.Model) -> Settings | None:
    mixture = deepseek_v2.moe_kind(model)
    if mixture is None:
        return None
    router = mixture.moe.router
    return {
        **deepseek_v2.shared_settings(model, mixture),
        "rope_interleave": mixture.mla.rope.pairs is config.Pairs.neighbours,
        "norm_topk_prob": router.normalize,
        "n_group": router.groups,
        "topk_group": router.top_groups,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "num_nextn_predict_layers": model.mtp.depth,
    }


TABLE = Table(
    hf_types={"deepseek_v3": "DeepseekV3ForCausalLM", "kimi_k2": "DeepseekV3ForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    ignored=IGNORED,
)
