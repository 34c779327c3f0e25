"""Qwen3-Next (Qwen Team, 2025) and Qwen3.5 (Qwen Team, 2026), text.

Qwen3-Next: Gated DeltaNet, gated attention, and MoE. Qwen3.5: the same layers with separate DeltaNet projections, dense
or with an MoE in every layer.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    SIZES,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    require_silu,
    rope,
    rope_settings,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Join, Settings, Table, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
DELTA, FULL = "attention/log_speed", "attention/query_norm/scale"
NORMS = (
    Weight("attention_norm/scale", HF + "input_layernorm.weight"),
    Weight("mlp_norm/scale", HF + "post_attention_layernorm.weight"),
)
ATTENTION = (
    Weight(
        ("attention/query/kernel", "attention/gate/kernel"),
        HF + "self_attn.q_proj.weight",
        join=Join.heads,
        requires=FULL,
    ),
    Weight("attention/key/kernel", HF + "self_attn.k_proj.weight", requires=FULL),
    Weight("attention/value/kernel", HF + "self_attn.v_proj.weight", requires=FULL),
    Weight("attention/out/kernel", HF + "self_attn.o_proj.weight", inputs=2, requires=FULL),
    *llama.QK_NORMS,
)
# DeltaNet tensors shared with Qwen3.5; the two differ in how the projections are fused.
STATE = (
    Weight(
        ("attention/query_filter/kernel", "attention/key_filter/kernel", "attention/value_filter/kernel"),
        HF + "linear_attn.conv1d.weight",
        singleton_axis=1,
    ),
    Weight("attention/log_speed", HF + "linear_attn.A_log"),
    Weight("attention/step_bias", HF + "linear_attn.dt_bias"),
    Weight("attention/norm/scale", HF + "linear_attn.norm.weight"),
    Weight("attention/out/kernel", HF + "linear_attn.out_proj.weight", inputs=2, requires=DELTA),
)
FUSED = (
    Weight(
        ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel", "attention/gate/kernel"),
        HF + "linear_attn.in_proj_qkvz.weight",
        join=Join.heads,
        requires=DELTA,
    ),
    Weight(
        ("attention/rate/kernel", "attention/decay/kernel"),
        HF + "linear_attn.in_proj_ba.weight",
        join=Join.heads,
        heads="attention/query/kernel",
    ),
)
QWEN3_NEXT_MOE = (
    *llama.EXPERTS,
    Weight("mlp/shared/gate/kernel", HF + "mlp.shared_expert.gate_proj.weight"),
    Weight("mlp/shared/up/kernel", HF + "mlp.shared_expert.up_proj.weight"),
    Weight("mlp/shared/down/kernel", HF + "mlp.shared_expert.down_proj.weight"),
    Weight("mlp/shared_gate/kernel", HF + "mlp.shared_expert_gate.weight"),
)
DELTA_SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
MIXERS = {"linear_attention": "delta", "full_attention": "attention"}


def mixers(settings: Settings) -> list[str]:
    """The layer_types; older files have full_attention_interval instead."""
    count, every = settings["num_hidden_layers"], settings.get("full_attention_interval", 4)
    types = settings.get("layer_types")
    return list(types or ("linear_attention" if (i + 1) % every else "full_attention" for i in range(count)))


def kind(settings: Settings, mixer: str, feed_forward: dict[str, Any]) -> dict[str, Any]:
    """Values of a layer kind with this mixer and feed-forward."""
    if MIXERS[mixer] == "delta":
        require_silu(settings)
        delta = {key: settings[hf_key] for key, hf_key in DELTA_SIZES.items()}
        return {"mixer": "delta", "delta": delta, **feed_forward}
    rope_values = {"share": 0.25, **rope(settings, is_partial=True)}
    return {"attention": {"gated": True, "qk_norm": "head", "rope": rope_values}, **feed_forward}


def moe(settings: Settings) -> dict[str, Any]:
    """Values of an MoE feed-forward."""
    return {
        "feed_forward": "moe",
        "moe": {
            "experts": settings["num_experts"],
            "top_k": settings["num_experts_per_tok"],
            "dim": settings["moe_intermediate_size"],
            "activation": activation(settings["hidden_act"]),
            "router": {"normalize": settings.get("norm_topk_prob", True)},
            "shared": {"dim": settings["shared_expert_intermediate_size"], "gate": "sigmoid"},
        },
    }


def mlp(settings: Settings) -> dict[str, Any]:
    return {"mlp": {"activation": activation(settings["hidden_act"])}}


def model_values(settings: Settings, kinds: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """Values of `model` with these kinds, and one name of a kind per layer."""
    return {
        **sizes(settings),
        "norm": "rms_plus_one",
        "head": head(settings, tied=False),
        "kinds": kinds,
        "pattern": pattern_of(names),
    }


def qwen3_next_to_model(settings: Settings) -> dict[str, Any]:
    dense = set(settings.get("mlp_only_layers") or ())
    step = settings.get("decoder_sparse_step", 1)
    names, kinds = [], {}
    for index, mixer in enumerate(mixers(settings)):
        is_mixture = index not in dense and settings["num_experts"] > 0 and (index + 1) % step == 0
        name = f"{MIXERS[mixer]}{'' if is_mixture else '_dense'}"
        kinds[name] = kind(settings, mixer, moe(settings) if is_mixture else mlp(settings))
        names.append(name)
    return model_values(settings, kinds, names)


def common_settings(model: config.Model) -> Settings:
    """Settings shared by Qwen3-Next and Qwen3.5."""
    kinds = layer_kinds(model)
    full = next((kind for kind in kinds if kind.mixer is config.Mixer.attention), kinds[0])
    delta = next((kind for kind in kinds if kind.mixer is config.Mixer.delta), kinds[0])
    types = {mixer: layer_type for layer_type, mixer in MIXERS.items()}
    names = {key: hf_key for key, hf_key in SIZES.items() if key != "mlp_dim"}
    return {
        **size_settings(model, names),
        **rope_settings(full.attention.rope),
        "partial_rotary_factor": full.attention.rope.share,
        **{hf_key: getattr(delta.delta, key) for key, hf_key in DELTA_SIZES.items()},
        "layer_types": [types[kind.mixer.value] for kind in kinds],
        "tie_word_embeddings": model.head is config.Head.tied,
    }


def moe_settings(kind: config.Kind) -> Settings:
    """Settings of an MoE layer."""
    moe = kind.moe
    return {
        "num_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.dim,
        "shared_expert_intermediate_size": moe.shared.dim,
        "hidden_act": activation_setting(moe.activation),
    }


def qwen3_next_to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    mixture = next((kind for kind in kinds if kind.feed_forward is config.FeedForward.moe), None)
    if mixture is None:
        return None
    return {
        **common_settings(model),
        **moe_settings(mixture),
        "intermediate_size": model.mlp_dim,
        "norm_topk_prob": mixture.moe.router.normalize,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i, kind in enumerate(kinds) if kind.feed_forward is config.FeedForward.mlp],
    }


QWEN3_NEXT = Table(
    hf_types={"qwen3_next": "Qwen3NextForCausalLM"},
    layer=(*NORMS, *ATTENTION, *STATE, *FUSED, *llama.MLP, *QWEN3_NEXT_MOE),
    non_layer=llama.NON_LAYER,
    to_model=qwen3_next_to_model,
    to_settings=qwen3_next_to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
)


SEPARATE = (
    Weight(
        ("attention/query/kernel", "attention/key/kernel", "attention/value/kernel"),
        HF + "linear_attn.in_proj_qkv.weight",
        requires=DELTA,
    ),
    Weight("attention/gate/kernel", HF + "linear_attn.in_proj_z.weight", requires=DELTA),
    Weight("attention/rate/kernel", HF + "linear_attn.in_proj_b.weight"),
    Weight("attention/decay/kernel", HF + "linear_attn.in_proj_a.weight"),
)
QWEN3_5_LAYER = (*NORMS, *ATTENTION, *STATE, *SEPARATE)


def qwen3_5_to_model(settings: Settings) -> dict[str, Any]:
    types = mixers(settings)
    kinds = {MIXERS[name]: kind(settings, name, mlp(settings)) for name in types}
    return model_values(settings, kinds, [MIXERS[name] for name in types])


def qwen3_5_to_settings(model: config.Model) -> Settings | None:
    first = layer_kinds(model)[0]
    return {
        **common_settings(model),
        "intermediate_size": model.mlp_dim,
        "hidden_act": activation_setting(first.mlp.activation),
    }


QWEN3_5 = Table(
    hf_types={"qwen3_5_text": "Qwen3_5ForCausalLM"},
    layer=(*QWEN3_5_LAYER, *llama.MLP),
    non_layer=llama.NON_LAYER,
    to_model=qwen3_5_to_model,
    to_settings=qwen3_5_to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
)


def qwen3_5_moe_to_model(settings: Settings) -> dict[str, Any]:
    """Every layer is an MoE, so config.json has no intermediate_size; fill it with the size of an expert."""
    types = mixers(settings)
    kinds = {MIXERS[name]: kind(settings, name, moe(settings)) for name in types}
    filled = {"intermediate_size": settings["moe_intermediate_size"], **settings}
    return model_values(filled, kinds, [MIXERS[name] for name in types])


def qwen3_5_moe_to_settings(model: config.Model) -> Settings | None:
    return {**common_settings(model), **moe_settings(layer_kinds(model)[0])}


QWEN3_5_MOE = Table(
    hf_types={"qwen3_5_moe_text": "Qwen3_5MoeForCausalLM"},
    layer=(*QWEN3_5_LAYER, *QWEN3_NEXT_MOE),
    non_layer=llama.NON_LAYER,
    to_model=qwen3_5_moe_to_model,
    to_settings=qwen3_5_moe_to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
)

TABLES = (QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE)
