"""DeepSeek-V4 (DeepSeek-AI, 2026).

Attention to a sliding window and to compressed entries of earlier tokens, four residual streams, and experts that the
leading layers choose by token id. The type of a layer is sliding_attention (no entries), heavily_compressed_attention
(entries of many tokens) or compressed_sparse_attention (overlapping entries of few tokens, selected by an indexer).

Tensors have the names of the published files, below `model.` as transformers writes them. MTP layers are skipped.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.config.schema.compressed import CompressedAttention
from maxhydra.config.schema.residual import StreamForm
from maxhydra.convert.hf_config import (
    WINDOWED,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    rope_from,
    rope_parameters,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
ATTENTION, EXPERTS = HF + "attn.", HF + "ffn."


def compressor_rows(path: str, prefix: str) -> tuple[Weight, ...]:
    """Rows of a compressor."""
    return (
        Weight(f"{path}/value/kernel", prefix + "wkv.weight"),
        Weight(f"{path}/gate/kernel", prefix + "wgate.weight"),
        Weight(f"{path}/position_bias", prefix + "ape", transposed=False),
        Weight(f"{path}/norm/scale", prefix + "norm.weight"),
    )


def stream_rows(path: str, prefix: str) -> tuple[Weight, ...]:
    """Rows of weights of the residual streams."""
    names = {"kernel": "fn", "bias": "base", "factor": "scale"}
    return tuple(Weight(f"{path}/{name}", prefix + hf_name) for name, hf_name in names.items())


MATRICES = {"gate": "w1", "down": "w2", "up": "w3"}
LAYER = (
    Weight("attention_norm/scale", HF + "attn_norm.weight"),
    Weight("mlp_norm/scale", HF + "ffn_norm.weight"),
    *stream_rows("attention_streams", HF + "hc_attn_"),
    *stream_rows("mlp_streams", HF + "hc_ffn_"),
    Weight("attention/query_down/kernel", ATTENTION + "wq_a.weight"),
    Weight("attention/query_norm/scale", ATTENTION + "q_norm.weight"),
    Weight("attention/query_up/kernel", ATTENTION + "wq_b.weight"),
    Weight("attention/key/kernel", ATTENTION + "wkv.weight"),
    Weight("attention/key_norm/scale", ATTENTION + "norm.weight"),
    Weight("attention/group/kernel", ATTENTION + "wo_a.weight"),
    Weight("attention/out/kernel", ATTENTION + "wo_b.weight", inputs=2),
    Weight("attention/sinks", ATTENTION + "attn_sink"),
    *compressor_rows("attention/compressor", ATTENTION + "compressor."),
    *compressor_rows("attention/indexer/compressor", ATTENTION + "indexer.compressor."),
    Weight("attention/indexer/query/kernel", ATTENTION + "indexer.wq_b.weight"),
    Weight("attention/indexer/weight/kernel", ATTENTION + "indexer.weights_proj.weight"),
    Weight("mlp/router/kernel", EXPERTS + "gate.weight"),
    Weight("mlp/router/correction", EXPERTS + "gate.bias"),
    Weight("mlp/router/table", EXPERTS + "gate.tid2eid", transposed=False, dtype="int64"),
    *(
        Weight(f"mlp/experts/{name}/kernel", EXPERTS + f"experts.{{expert}}.{hf}.weight")
        for name, hf in MATRICES.items()
    ),
    *(Weight(f"mlp/shared/{name}/kernel", EXPERTS + f"shared_experts.{hf}.weight") for name, hf in MATRICES.items()),
)
NON_LAYER = (
    Weight("embedding/table", "model.embed_tokens.weight", transposed=False),
    *stream_rows("stream_head", "model.hc_head.hc_"),
    Weight("final_norm/scale", "model.norm.weight"),
    Weight("head/kernel", "head.weight"),
)
# Names in published files -> names that transformers writes.
RENAMED = {
    "layers.": "model.layers.",
    "embed.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "hc_head_": "model.hc_head.hc_",
}

HEAVY, SPARSE = "heavily_compressed_attention", "compressed_sparse_attention"
KINDS = {WINDOWED: "window", HEAVY: "dense", SPARSE: "sparse"}
RATES = {SPARSE: 4, HEAVY: 128}
# Tokens per entry, by layer, in published files -> type of the layer.
TYPES = {0: WINDOWED, 4: SPARSE, 128: HEAVY}
SCORES = {"sqrtsoftplus": "sqrt_softplus", "sigmoid": "sigmoid", "softmax": "softmax"}
BY_TOKEN, BY_SCORE = "hash_moe", "moe"
ENTRY_THETA = 160000.0
HYPER = {"streams": "hc_mult", "sinkhorn_iterations": "hc_sinkhorn_iters"}
INDEXER = {"top_k": "index_topk", "num_heads": "index_n_heads", "head_dim": "index_head_dim"}
ATTENTION_SIZES = {
    "q_lora_rank": "q_lora_rank",
    "window": "sliding_window",
    "out_groups": "o_groups",
    "out_rank": "o_lora_rank",
}
EPS = 1e-6


def layer_types(settings: Settings) -> list[str]:
    """The type of every layer."""
    count, ratios = settings["num_hidden_layers"], settings.get("compress_ratios")
    types = settings.get("layer_types") or [TYPES.get(ratio, str(ratio)) for ratio in ratios or ()]
    if not types:
        types = [HEAVY] * 2 + [SPARSE if index % 2 else HEAVY for index in range(count - 2)]
    if unknown := [name for name in types if name not in KINDS]:
        raise UnsupportedError(f"unsupported layer type {unknown[0]} (supported: {', '.join(KINDS)})")
    return list(types[:count])


def rotations(settings: Settings) -> tuple[dict[str, Any], dict[str, Any]]:
    """RoPE of layers without entries, and of those with entries, whose context may be extended."""
    parameters = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    share = settings.get("partial_rotary_factor")
    share = settings.get("qk_rope_head_dim", 64) / settings["head_dim"] if share is None else share
    if "main" in parameters:
        main, entries = parameters["main"], parameters["compress"]
    else:
        main = {"rope_theta": settings.get("rope_theta", 10000.0)}
        entries = {**parameters, "rope_theta": settings.get("compress_rope_theta", ENTRY_THETA)}
    both = []
    for each in (main, entries):
        is_yarn = (each.get("rope_type") or each.get("type")) == "yarn"
        factor = {"attention_factor": 1.0} if is_yarn else {}
        values = rope_from({"partial_rotary_factor": share, **factor, **each}, settings, is_partial=True)
        both.append({**values, "pairs": "neighbours"})
    return both[0], both[1]


def attention_values(settings: Settings) -> dict[str, dict[str, Any]]:
    """Values of `model.kinds.*.compressed` by layer type."""
    if settings.get("attention_bias"):
        raise UnsupportedError("unsupported attention_bias=true, which no published model uses")
    main, entries = rotations(settings)
    rates = {**RATES, **(settings.get("compress_rates") or {})}
    common = {key: settings[hf_key] for key, hf_key in ATTENTION_SIZES.items()}
    indexer = {key: settings[hf_key] for key, hf_key in INDEXER.items()} | {"pairs": "neighbours"}
    return {
        WINDOWED: {**common, "rope": main},
        HEAVY: {**common, "rope": entries, "rate": rates[HEAVY]},
        SPARSE: {**common, "rope": entries, "rate": rates[SPARSE], "overlap": True, "indexer": indexer},
    }


def moe_values(settings: Settings, router: dict[str, Any]) -> dict[str, Any]:
    """Values of `model.kinds.*.moe`."""
    name = settings.get("scoring_func", "sqrtsoftplus")
    if name not in SCORES:
        raise UnsupportedError(f"unsupported scoring_func={name} (supported: {', '.join(SCORES)})")
    dim = settings["moe_intermediate_size"]
    return {
        "experts": settings["n_routed_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": dim,
        "activation": activation(settings.get("hidden_act", "silu")),
        "limit": float(settings.get("swiglu_limit", 10.0)),
        "router": {"scores": SCORES[name], "scale": float(settings.get("routed_scaling_factor", 1.5)), **router},
        "shared": {"dim": dim},
    }


def to_model(settings: Settings) -> dict[str, Any]:
    if settings.get("hc_mult", 4) < 2 or settings.get("hc_eps", EPS) != EPS:
        raise UnsupportedError(f"hc_mult < 2 or hc_eps other than {EPS} (supported: several streams, {EPS})")
    types, count = layer_types(settings), settings["num_hidden_layers"]
    mixtures = settings.get("mlp_layer_types")
    mixtures = list(mixtures or [BY_TOKEN] * settings.get("num_hash_layers", 3) + [BY_SCORE] * count)[:count]
    if unknown := [name for name in mixtures if name not in (BY_TOKEN, BY_SCORE)]:
        raise UnsupportedError(f"unsupported mlp_layer_types {unknown[0]} (supported: {BY_TOKEN}, {BY_SCORE})")
    attention, kinds, names = attention_values(settings), dict[str, Any](), []
    routers: dict[str, dict[str, Any]] = {BY_TOKEN: {"by_token": True}, BY_SCORE: {"bias_rate": 0.001}}
    for layer_type, mixture in zip(types, mixtures, strict=True):
        name = KINDS[layer_type] + ("_by_token" if mixture == BY_TOKEN else "")
        moe = moe_values(settings, routers[mixture])
        kinds[name] = {"mixer": "compressed", "compressed": attention[layer_type], "feed_forward": "moe", "moe": moe}
        names.append(name)
    leading = next((index for index, name in enumerate(mixtures) if name == BY_SCORE), count)
    return {
        **sizes({**settings, "intermediate_size": settings["moe_intermediate_size"]}),
        "head": head(settings, tied=False),
        "hyper_connections": {"form": "weighted", **{key: settings[hf_key] for key, hf_key in HYPER.items()}},
        "prefix": names[:leading],
        "pattern": pattern_of(names[leading:]),
        "kinds": kinds,
    }


def _type_of(section: CompressedAttention) -> str:
    if section.rate is None:
        return WINDOWED
    return HEAVY if section.indexer.top_k is None else SPARSE


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    is_family = all(
        (kind.mixer, kind.feed_forward) == (config.Mixer.compressed, config.FeedForward.moe) for kind in kinds
    )
    if not is_family or model.hyper_connections.form is not StreamForm.weighted:
        return None
    types = [_type_of(kind.compressed) for kind in kinds]
    sections = {name: kind.compressed for name, kind in zip(types, kinds, strict=True)}
    first, moe = kinds[0].compressed, kinds[-1].moe
    with_entries = sections.get(SPARSE) or sections.get(HEAVY) or first
    indexer = sections.get(SPARSE, first).indexer
    main = sections.get(WINDOWED)
    share = {"partial_rotary_factor": first.rope.share}
    plain = {"rope_type": "default", "rope_theta": 10000.0}
    return {
        **{name: value for name, value in size_settings(model).items() if name != "intermediate_size"},
        **{hf_key: getattr(first, key) for key, hf_key in ATTENTION_SIZES.items()},
        **{hf_key: getattr(model.hyper_connections, key) for key, hf_key in HYPER.items()},
        **{hf_key: getattr(indexer, key) for key, hf_key in INDEXER.items() if getattr(indexer, key) is not None},
        **({} if indexer.top_k is not None else {"index_topk": 512}),
        "hc_eps": EPS,
        "layer_types": types,
        "mlp_layer_types": [BY_TOKEN if kind.moe.router.by_token else BY_SCORE for kind in kinds],
        "compress_rates": {name: sections[name].rate if name in sections else rate for name, rate in RATES.items()},
        "partial_rotary_factor": first.rope.share,
        "rope_parameters": {
            "main": {**(plain if main is None else rope_parameters(main.rope)), **share},
            "compress": {**rope_parameters(with_entries.rope), **share},
        },
        "moe_intermediate_size": moe.dim or model.mlp_dim,
        "n_routed_experts": moe.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": moe.top_k,
        "hidden_act": activation_setting(moe.activation),
        "scoring_func": next(name for name, scores in SCORES.items() if scores == moe.router.scores.value),
        "routed_scaling_factor": moe.router.scale,
        "swiglu_limit": moe.limit,
        "tie_word_embeddings": model.head is config.Head.tied,
        "num_nextn_predict_layers": 0,
    }


TABLE = Table(
    hf_types={"deepseek_v4": "DeepseekV4ForCausalLM"},
    layer=LAYER,
    non_layer=NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    ignored=("*.rotary_emb.*inv_freq", "mtp.*"),
    renamed=RENAMED,
)
