"""GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team, 2025), and GLM-5 (GLM-5 Team, 2026).

GLM-4.5: grouped-query attention with RoPE on half of each head, and the experts of DeepSeek-V3. GLM-5: DeepSeek-V3.2
with RoPE on adjacent pairs in the indexer.

MTP layers are those of DeepSeek-V3.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import head, layer_kinds, rope, rope_settings, size_settings, sizes
from maxhydra.convert.name_table import Settings, Table, UnsupportedError
from maxhydra.convert.tables import deepseek, llama

# Rows of DeepSeek's layers that this attention replaces.
REPLACED = ("attention", "attention_norm", "mlp_norm")
GLM4_MOE_LAYER = (
    *llama.MIXER,
    *llama.BIASES,
    *llama.QK_NORMS,
    *(row for row in deepseek.DEEPSEEK_V3_LAYER if row.paths[0].partition("/")[0] not in REPLACED),
)


def glm4_moe_to_model(settings: Settings) -> dict[str, Any]:
    attention = {
        "bias": "qkv" if settings.get("attention_bias") else "none",
        "qk_norm": "head" if settings.get("use_qk_norm") else "none",
        "rope": {"share": 0.5, **rope(settings)},
    }
    layers = deepseek.expert_layers(settings, {"attention": attention}, deepseek.router(settings))
    return {**sizes(settings), "head": head(settings, tied=False), **layers}


def glm4_moe_to_settings(model: config.Model) -> Settings | None:
    mixture = layer_kinds(model)[-1]
    if mixture.mixer is not config.Mixer.attention or mixture.feed_forward is not config.FeedForward.moe:
        return None
    attention = mixture.attention
    return {
        **size_settings(model),
        **rope_settings(attention.rope),
        "partial_rotary_factor": attention.rope.share,
        "attention_bias": attention.bias is config.AttentionBias.qkv,
        "use_qk_norm": attention.qk_norm is config.QkNorm.head,
        "tie_word_embeddings": model.head is config.Head.tied,
        **deepseek.expert_settings(model, mixture),
        **deepseek.router_settings(mixture.moe.router),
        "num_nextn_predict_layers": model.mtp.depth,
    }


GLM4_MOE = Table(
    hf_types={"glm4_moe": "Glm4MoeForCausalLM"},
    layer=GLM4_MOE_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=glm4_moe_to_model,
    to_settings=glm4_moe_to_settings,
    ignored=deepseek.IGNORED,
)


def glm_moe_dsa_to_model(settings: Settings) -> dict[str, Any]:
    _reject_shared_indexers(settings)
    values = deepseek.deepseek_v32_to_model({"first_k_dense_replace": 3, **settings})
    for kind in values["kinds"].values():
        kind["mla"]["indexer"]["pairs"] = "neighbours"
    return values


def _reject_shared_indexers(settings: Settings) -> None:
    """Reject layers that attend to the tokens which an earlier layer selected."""
    every = settings.get("index_topk_freq") or 1
    types = settings.get("indexer_types") or settings.get("index_topk_pattern") or ["full" if every == 1 else "shared"]
    if not {*types} <= {"full", "F"}:
        keys = "indexer_types, index_topk_pattern or index_topk_freq"
        raise UnsupportedError(f"layers that share an indexer, by {keys} (supported: one in each layer)")


def glm_moe_dsa_to_settings(model: config.Model) -> Settings | None:
    settings = deepseek.deepseek_v32_to_settings(model)
    return None if settings is None else {**settings, "indexer_types": ["full"] * model.num_layers}


GLM_MOE_DSA = Table(
    hf_types={"glm_moe_dsa": "GlmMoeDsaForCausalLM"},
    layer=deepseek.DEEPSEEK_V32_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=glm_moe_dsa_to_model,
    to_settings=glm_moe_dsa_to_settings,
    ignored=deepseek.IGNORED,
)

TABLES = (GLM4_MOE, GLM_MOE_DSA)
