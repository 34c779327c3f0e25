"""DeepSeek-V3.2 (DeepSeek-AI, 2025): DeepSeek-V3 with an indexer that selects the keys of sparse attention."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import deepseek_v2, deepseek_v3, llama

INDEXER = llama.HF + "self_attn.indexer."
LAYER = (
    *deepseek_v3.LAYER,
    Weight("attention/indexer/query/kernel", INDEXER + "wq_b.weight"),
    Weight("attention/indexer/key/kernel", INDEXER + "wk.weight"),
    Weight("attention/indexer/key_norm/scale", INDEXER + "k_norm.weight"),
    Weight("attention/indexer/key_norm/bias", INDEXER + "k_norm.bias"),
    Weight("attention/indexer/weight/kernel", INDEXER + "weights_proj.weight"),
)


def to_model(settings: Settings) -> dict[str, Any]:
    indexer = {
        "top_k": settings["index_topk"],
        "num_heads": settings["index_n_heads"],
        "head_dim": settings["index_head_dim"],
    }
    types = settings.get("mlp_layer_types")
    if types:
        dense = types.count("dense")
        if types != ["dense"] * dense + ["sparse"] * (len(types) - dense):
            raise UnsupportedError("unsupported order of mlp_layer_types (supported: dense layers before sparse ones)")
        settings = {**settings, "first_k_dense_replace": dense}
    mla = {**deepseek_v2.mla_values(settings), "indexer": indexer}
    return deepseek_v2.model_values(settings, mla, deepseek_v3.router(settings))


def to_settings(model: config.Model) -> Settings | None:
    settings, mixture = deepseek_v3.to_settings(model), deepseek_v2.moe_kind(model)
    if settings is None or mixture is None or mixture.mla.indexer.top_k is None:
        return None
    indexer = mixture.mla.indexer
    index_settings = {
        "index_topk": indexer.top_k,
        "index_n_heads": indexer.num_heads,
        "index_head_dim": indexer.head_dim,
    }
    return {**settings, **index_settings}


TABLE = Table(
    hf_types={"deepseek_v32": "DeepseekV32ForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    ignored=deepseek_v3.IGNORED,
)
