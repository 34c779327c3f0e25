"""Gemma 4 (2026), text: full-attention layers have their own head sizes, and may use their keys as values.

The small models share the KV cache among the later layers and have per-layer embeddings; one model has an MoE in
parallel with its MLP.
"""

from collections.abc import Mapping
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    KIND_NAMES,
    WINDOWED,
    activation,
    activation_setting,
    head,
    kind_by_type,
    layer_kinds,
    layer_types,
    pattern_of,
    size_settings,
    sizes,
    window_settings,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import gemma, llama

HF = llama.HF
PER_LAYER = (
    Weight("per_layer/gate/kernel", HF + "per_layer_input_gate.weight"),
    Weight("per_layer/out/kernel", HF + "per_layer_projection.weight"),
    Weight("per_layer/norm/scale", HF + "post_per_layer_input_norm.weight"),
)
PARALLEL_MOE = (
    Weight("parallel_moe/first_norm/scale", HF + "post_feedforward_layernorm_1.weight"),
    Weight("parallel_moe/norm/scale", HF + "pre_feedforward_layernorm_2.weight"),
    Weight("parallel_moe/out_norm/scale", HF + "post_feedforward_layernorm_2.weight"),
    Weight("parallel_moe/moe/router/kernel", HF + "router.proj.weight"),
    Weight("parallel_moe/moe/router/scale", HF + "router.scale"),
    Weight("parallel_moe/moe/router/expert_scale", HF + "router.per_expert_scale"),
    Weight(
        ("parallel_moe/moe/experts/gate/kernel", "parallel_moe/moe/experts/up/kernel"),
        HF + "experts.gate_up_proj",
        leading=1,
    ),
    Weight("parallel_moe/moe/experts/down/kernel", HF + "experts.down_proj", leading=1),
)
NON_LAYER = (
    Weight("per_layer/table", "model.embed_tokens_per_layer.weight", transposed=False),
    Weight("per_layer/context/kernel", "model.per_layer_model_projection.weight"),
    Weight("per_layer/norm/scale", "model.per_layer_projection_norm.weight"),
)
# Defaults of keys that the published files omit.
DEFAULTS: Settings = {
    "hidden_activation": "gelu_pytorch_tanh",
    "global_head_dim": 512,
    "rope_parameters": {
        WINDOWED: {"rope_type": "default", "rope_theta": 10_000.0},
        FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
    },
}
SHARED = "_shared"


def rope(parameters: Mapping[str, Any]) -> dict[str, Any]:
    kind = parameters.get("rope_type", "default")
    if kind not in ("default", "proportional") or parameters.get("factor", 1.0) != 1.0:
        raise UnsupportedError(
            f"unsupported rope_type={kind} or factor (supported: default and proportional, factor 1)"
        )
    return {"kind": kind, "theta": parameters["rope_theta"], "share": parameters.get("partial_rotary_factor", 1.0)}


def full_attention(settings: Settings, types: list[str]) -> dict[str, Any]:
    """Values of full attention that differ from the windowed layers."""
    is_key = bool(settings.get("attention_k_eq_v"))
    heads = settings.get("num_global_key_value_heads") if is_key else None
    head_settings = {"head_dim": settings["global_head_dim"], "num_key_value_heads": heads}
    if (by_layer := settings.get("per_layer_config")) is not None:
        # As transformers writes it: only the keys that differ from the top level.
        head_settings = by_layer.get(str(types.index(FULL)) if FULL in types else "", {})
    return {
        "head_dim": head_settings.get("head_dim") or settings["head_dim"],
        "num_kv_heads": head_settings.get("num_key_value_heads") or settings["num_key_value_heads"],
        "value": "key" if is_key else "own",
    }


def moe(settings: Settings, function: str) -> dict[str, Any]:
    """Values of the MoE in parallel with the MLP; empty if there is none."""
    if not settings.get("enable_moe_block"):
        return {}
    mixture = {
        "experts": settings["num_experts"],
        "top_k": settings["top_k_experts"],
        "dim": settings["moe_intermediate_size"],
        "activation": function,
        "router": {"norm": True, "expert_scale": True},
    }
    return {"parallel_moe": "moe", "moe": mixture}


def kinds(settings: Settings, types: list[str]) -> dict[str, Any]:
    """Two kinds per layer type: one with its own KV cache, and one that shares that cache."""
    function = activation(settings["hidden_activation"])
    mixture = moe(settings, function)
    width = settings["intermediate_size"] * (2 if settings.get("use_double_wide_mlp") else 1)
    attention_values = {WINDOWED: {"window": settings["sliding_window"]}, FULL: full_attention(settings, types)}
    values = {}
    for name, attention in attention_values.items():
        attention |= {"scale": 1.0, "qk_norm": "head", "rope": rope(settings["rope_parameters"][name])}
        layer = {"norms": "sandwich", "is_scaled": True, "mlp": {"activation": function}, **mixture}
        sharing = {key: value for key, value in attention.items() if key != "value"} | {"shares": KIND_NAMES[name]}
        values[KIND_NAMES[name]] = {**layer, "attention": {**attention, "value_norm": True}}
        values[KIND_NAMES[name] + SHARED] = {**layer, "mlp": {**layer["mlp"], "dim": width}, "attention": sharing}
    return values


def to_model(settings: Settings) -> dict[str, Any]:
    settings = {**DEFAULTS, **settings}
    if settings.get("attention_bias"):
        raise UnsupportedError("unsupported attention_bias, which no published model uses")
    per_layer_dim = settings.get("hidden_size_per_layer_input") or None
    if per_layer_dim and settings.get("vocab_size_per_layer_input", settings["vocab_size"]) != settings["vocab_size"]:
        raise UnsupportedError("unsupported vocab_size_per_layer_input (supported: vocab_size)")
    types = layer_types(settings, every=6)
    shared = settings.get("num_kv_shared_layers", 0)
    names = [KIND_NAMES[name] for name in types]
    first = len(names) - shared
    prefix, rest = (names[:first], [name + SHARED for name in names[first:]]) if shared else ([], names)
    all_kinds = kinds(settings, types)
    return {
        **sizes(settings),
        "head": head(settings, tied=True),
        "embedding": {"scale": "root_dim"},
        "per_layer": {"dim": per_layer_dim, "activation": activation(settings["hidden_activation"])},
        "logit_softcap": settings.get("final_logit_softcapping"),
        "prefix": prefix,
        "pattern": pattern_of(rest),
        "kinds": {name: all_kinds[name] for name in dict.fromkeys([*prefix, *rest])},
    }


def rope_parameters(rope: config.Rope) -> Settings:
    share = {} if rope.share == 1 else {"partial_rotary_factor": rope.share}
    return {"rope_type": rope.kind.value, "rope_theta": rope.theta, **share}


def to_settings(model: config.Model) -> Settings | None:
    layers, types = layer_kinds(model), kind_by_type(model)
    first, full = layers[0], types[FULL].attention
    sharing = [kind for kind in layers if kind.attention.shares is not None]
    is_key = full.value is config.ValueSource.key
    mixture = {
        "enable_moe_block": first.parallel_moe is config.ParallelMoe.moe,
        "num_experts": first.moe.experts,
        "top_k_experts": first.moe.top_k,
        "moe_intermediate_size": first.moe.dim,
    }
    return {
        **size_settings(model),
        **window_settings(model),
        **mixture,
        "rope_parameters": {name: rope_parameters(kind.attention.rope) for name, kind in types.items()},
        "global_head_dim": full.head_dim or model.head_dim,
        "num_global_key_value_heads": (full.num_kv_heads or model.num_kv_heads) if is_key else None,
        "attention_k_eq_v": is_key,
        "num_kv_shared_layers": len(sharing),
        "use_double_wide_mlp": any(kind.mlp.dim == 2 * model.mlp_dim for kind in sharing),
        "hidden_size_per_layer_input": model.per_layer.dim or 0,
        "vocab_size_per_layer_input": model.vocab_size,
        "final_logit_softcapping": model.logit_softcap,
        "hidden_activation": activation_setting(first.mlp.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
    }


TABLE = Table(
    hf_types={"gemma4_text": "Gemma4ForCausalLM"},
    layer=(*gemma.GEMMA2_LAYER, *llama.QK_NORMS, Weight("scale", HF + "layer_scalar"), *PER_LAYER, *PARALLEL_MOE),
    non_layer=(*llama.NON_LAYER, *NON_LAYER),
    to_model=to_model,
    to_settings=to_settings,
    # Published files contain projections that layers with a shared KV cache do not use.
    ignored=("*.rotary_emb.inv_freq", *(f"*.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm"))),
)
