"""GLM-4.5, 4.6 and 4.7 (GLM-4.5 Team, 2025), and GLM-5 (GLM-5 Team, 2026).

GLM-4.5: grouped-query attention with RoPE on half of each head, and the experts of DeepSeek-V3. GLM-5: DeepSeek-V3.2
with RoPE on adjacent pairs in the indexer, which several layers may share (IndexCache, 2026).

MTP layers are those of DeepSeek-V3.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import head, layer_kinds, pattern_of, rope, rope_settings, size_settings, sizes
from maxhydra.convert.name_table import Settings, Table, UnsupportedError
from maxhydra.convert.tables import deepseek, llama

# Values of indexer_types.
FULL, SHARED = "full", "shared"
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
        "rope": {"share": 0.5, **rope(settings, is_partial=True)},
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
    values = deepseek.deepseek_v32_to_model({"first_k_dense_replace": 3, **settings})
    for kind in values["kinds"].values():
        kind["mla"]["indexer"]["pairs"] = "neighbours"
    types = indexer_types(settings)
    return {**values, **with_shared_indexers(values, types)} if SHARED in types else values


def indexer_types(settings: Settings) -> list[str]:
    """Which layers have an indexer, the others attend to the tokens that the latest of these selected."""
    count = settings["num_hidden_layers"]
    every, offset = max(settings.get("index_topk_freq") or 1, 1), settings.get("index_skip_topk_offset", 2)
    regular = [FULL if max(index - offset + 1, 0) % every == 0 else SHARED for index in range(count)]
    given = settings.get("indexer_types") or settings.get("index_topk_pattern") or regular
    types = [{"F": FULL, "S": SHARED}.get(name, name) for name in given]
    if len(types) != count or types[0] != FULL or not {*types} <= {FULL, SHARED}:
        accepted = f"{count} of {FULL} and {SHARED}, the first {FULL}"
        raise UnsupportedError(f"unsupported indexer_types or index_topk_pattern (supported: {accepted})")
    return types


def with_shared_indexers(values: dict[str, Any], types: list[str]) -> dict[str, Any]:
    """Values of `model.prefix`, `pattern` and `kinds`. The pattern starts with an indexer, if an MoE layer has one."""
    names, source, kinds = [], "", {}
    dense = len(values["prefix"])
    for index, name in enumerate(types):
        own = "dense" if index < dense else "layer"
        source = own if name == FULL else source
        names.append(own if name == FULL else f"{own}_of_{source}")
        mla = {key: value for key, value in values["kinds"][own]["mla"].items() if key != "indexer"}
        shared = {**values["kinds"][own], "mla": {**mla, "indexer_of": source}}
        kinds[names[-1]] = values["kinds"][own] if name == FULL else shared
    start = next((index for index in range(dense, len(types)) if types[index] == FULL), dense)
    return {"prefix": names[:start], "pattern": pattern_of(names[start:]), "kinds": kinds}


def glm_moe_dsa_to_settings(model: config.Model) -> Settings | None:
    settings = deepseek.deepseek_v32_to_settings(model)
    types = [FULL if kind.mla.indexer_of is None else SHARED for kind in layer_kinds(model)]
    return None if settings is None else {**settings, "indexer_types": types}


GLM_MOE_DSA = Table(
    hf_types={"glm_moe_dsa": "GlmMoeDsaForCausalLM"},
    layer=deepseek.DEEPSEEK_V32_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=glm_moe_dsa_to_model,
    to_settings=glm_moe_dsa_to_settings,
    ignored=deepseek.IGNORED,
)

TABLES = (GLM4_MOE, GLM_MOE_DSA)
