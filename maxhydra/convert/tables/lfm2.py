"""LFM2 (Liquid AI, 2025): gated short convolutions and attention with QK norm, dense or with MoE layers."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    SIZES,
    head,
    layer_kinds,
    pattern_of,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
CONVOLUTION = "conv"
FILTER, QK_NORM = "attention/filter/kernel", "attention/query_norm/scale"
GATES = ("attention/input_gate", "attention/output_gate", "attention/value")
MIXER = (
    Weight("attention_norm/scale", HF + "operator_norm.weight"),
    Weight("mlp_norm/scale", HF + "ffn_norm.weight"),
    Weight("attention/query/kernel", HF + "self_attn.q_proj.weight"),
    Weight("attention/key/kernel", HF + "self_attn.k_proj.weight"),
    Weight("attention/value/kernel", HF + "self_attn.v_proj.weight", requires=QK_NORM),
    Weight("attention/out/kernel", HF + "self_attn.out_proj.weight", inputs=2, requires=QK_NORM),
    Weight(QK_NORM, HF + "self_attn.q_layernorm.weight"),
    Weight("attention/key_norm/scale", HF + "self_attn.k_layernorm.weight"),
    Weight(tuple(f"{name}/kernel" for name in GATES), HF + "conv.in_proj.weight", requires=FILTER),
    Weight(tuple(f"{name}/bias" for name in GATES), HF + "conv.in_proj.bias", inputs=0),
    Weight(FILTER, HF + "conv.conv.weight", singleton_axis=1),
    Weight("attention/filter/bias", HF + "conv.conv.bias", inputs=0),
    Weight("attention/out/kernel", HF + "conv.out_proj.weight", requires=FILTER),
    Weight("attention/out/bias", HF + "conv.out_proj.bias", inputs=0),
)
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
MLP = tuple(Weight(f"mlp/{name}/kernel", HF + f"feed_forward.{hf}.weight") for name, hf in MATRICES.items())
EXPERTS = (
    Weight("mlp/router/kernel", HF + "feed_forward.gate.weight"),
    Weight("mlp/router/correction", HF + "feed_forward.expert_bias"),
    *(
        Weight(f"mlp/experts/{name}/kernel", HF + "feed_forward.experts.{expert}." + f"{hf}.weight")
        for name, hf in MATRICES.items()
    ),
)
NON_LAYER = (
    *(row for row in llama.NON_LAYER if row.path != "final_norm/scale"),
    Weight("final_norm/scale", "model.embedding_norm.weight"),
)
NAMES = {**SIZES, "norm_eps": "norm_eps"}


def kinds_of(settings: Settings) -> tuple[list[str], dict[str, Any]]:
    """The type of every layer, and the mixer of each type."""
    count, full = settings["num_hidden_layers"], settings.get("full_attn_idxs")
    default = [FULL if full is None or index in full else CONVOLUTION for index in range(count)]
    types = list(settings.get("layer_types") or default)
    attention = {"qk_norm": "head", "rope": rope({"rope_theta": 1_000_000.0, **settings})}
    convolution = {"taps": settings.get("conv_L_cache", 3), "bias": bool(settings.get("conv_bias"))}
    mixers = {
        FULL: {"attention": attention},
        CONVOLUTION: {"mixer": "convolution", "convolution": convolution},
    }
    if unknown := [name for name in types if name not in mixers]:
        raise UnsupportedError(f"unsupported layer_types {unknown[0]} (supported: {', '.join(mixers)})")
    return types, mixers


def shared_values(settings: Settings) -> dict[str, Any]:
    """Values of `model` that do not depend on the layers."""
    is_tied = settings.get("tie_embedding", settings.get("tie_word_embeddings", True))
    return {**sizes(settings, NAMES), "head": head({"tie_word_embeddings": is_tied}, tied=True)}


def shared_settings(model: config.Model) -> Settings:
    """Inverse of `shared_values` and `kinds_of`."""
    kinds = layer_kinds(model)
    full = next((kind for kind in kinds if kind.mixer is config.Mixer.attention), kinds[0])
    short = next((kind for kind in kinds if kind.mixer is config.Mixer.convolution), kinds[0])
    return {
        **size_settings(model, NAMES),
        **rope_settings(full.attention.rope),
        "layer_types": [CONVOLUTION if kind.mixer is config.Mixer.convolution else FULL for kind in kinds],
        "conv_L_cache": short.convolution.taps,
        "conv_bias": short.convolution.bias,
        "tie_word_embeddings": model.head is config.Head.tied,
    }


def has_convolution(model: config.Model) -> bool:
    """Whether a layer has a short convolution; a model without one is of another family."""
    return any(kind.mixer is config.Mixer.convolution for kind in layer_kinds(model))


def adjusted_size(settings: Settings) -> int:
    """Hidden size of the feed-forward: by default two thirds of intermediate_size, rounded up to a multiple."""
    size: int = settings["block_ff_dim" if "block_ff_dim" in settings else "intermediate_size"]
    if not settings.get("block_auto_adjust_ff_dim", True):
        return size
    size = int(2 * size / 3)
    factor: float | None = settings.get("block_ffn_dim_multiplier", 1.0)
    if factor is None:
        return size
    multiple: int = settings.get("block_multiple_of", 256)
    return multiple * -(-int(factor * size) // multiple)


def lfm2_to_model(settings: Settings) -> dict[str, Any]:
    types, mixers = kinds_of(settings)
    names = {FULL: "attention", CONVOLUTION: "convolution"}
    return {
        **shared_values({**settings, "intermediate_size": adjusted_size(settings)}),
        "kinds": {names[name]: mixers[name] for name in types},
        "pattern": pattern_of([names[name] for name in types]),
    }


def lfm2_to_settings(model: config.Model) -> Settings | None:
    if not has_convolution(model):
        return None
    return {**shared_settings(model), "block_auto_adjust_ff_dim": False}


LFM2 = Table(
    hf_types={"lfm2": "Lfm2ForCausalLM"},
    layer=(*MIXER, *MLP),
    non_layer=NON_LAYER,
    to_model=lfm2_to_model,
    to_settings=lfm2_to_settings,
)


def lfm2_moe_to_model(settings: Settings) -> dict[str, Any]:
    types, mixers = kinds_of(settings)
    router = {
        "scores": "sigmoid",
        "normalize": settings.get("norm_topk_prob", True),
        "normalize_eps": 1e-6,
        "scale": float(settings.get("routed_scaling_factor", 1.0)),
        "bias_rate": 0.001 if settings.get("use_expert_bias", True) else None,
    }
    moe = {
        "experts": settings["num_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": settings["moe_intermediate_size"],
        "router": router,
    }
    dense = min(settings.get("num_dense_layers", 2), len(types))
    names, kinds = [], {}
    for index, name in enumerate(types):
        short = "convolution" if name == CONVOLUTION else "attention"
        names.append(f"{short}_dense" if index < dense else short)
        kinds[names[-1]] = mixers[name] if index < dense else {**mixers[name], "feed_forward": "moe", "moe": moe}
    layers = {"kinds": kinds, "prefix": names[:dense], "pattern": pattern_of(names[dense:])}
    return {**shared_values(settings), **layers}


def lfm2_moe_to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    mixture = next((kind.moe for kind in kinds if kind.feed_forward is config.FeedForward.moe), None)
    if mixture is None or not has_convolution(model):
        return None
    return {
        **shared_settings(model),
        "num_dense_layers": sum(kind.feed_forward is config.FeedForward.mlp for kind in kinds),
        "num_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
        "moe_intermediate_size": mixture.dim or model.mlp_dim,
        "norm_topk_prob": mixture.router.normalize,
        "routed_scaling_factor": mixture.router.scale,
        "use_expert_bias": mixture.router.bias_rate is not None,
    }


LFM2_MOE = Table(
    hf_types={"lfm2_moe": "Lfm2MoeForCausalLM"},
    layer=(*MIXER, *MLP, *EXPERTS),
    non_layer=NON_LAYER,
    to_model=lfm2_moe_to_model,
    to_settings=lfm2_moe_to_settings,
)

TABLES = (LFM2, LFM2_MOE)
