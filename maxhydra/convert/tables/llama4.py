"""Llama 4 (Meta, 2025), text: chunked-attention layers, layers without RoPE, top-1 MoE with a shared expert."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    SIZES,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    rope,
    rope_settings,
    rotated_layers,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
FEED_FORWARD = HF + "feed_forward."
LAYER = (
    *llama.MIXER,
    *llama.BIASES,
    Weight("mlp/gate/kernel", FEED_FORWARD + "gate_proj.weight"),
    Weight("mlp/up/kernel", FEED_FORWARD + "up_proj.weight"),
    Weight("mlp/down/kernel", FEED_FORWARD + "down_proj.weight"),
    Weight("mlp/router/kernel", FEED_FORWARD + "router.weight"),
    Weight(
        ("mlp/experts/gate/kernel", "mlp/experts/up/kernel"),
        FEED_FORWARD + "experts.gate_up_proj",
        transposed=False,
        leading=1,
    ),
    Weight("mlp/experts/down/kernel", FEED_FORWARD + "experts.down_proj", transposed=False, leading=1),
    Weight("mlp/shared/gate/kernel", FEED_FORWARD + "shared_expert.gate_proj.weight"),
    Weight("mlp/shared/up/kernel", FEED_FORWARD + "shared_expert.up_proj.weight"),
    Weight("mlp/shared/down/kernel", FEED_FORWARD + "shared_expert.down_proj.weight"),
)
# model.mlp_dim is the size of the dense layers.
NAMES = {**SIZES, "mlp_dim": "intermediate_size_mlp"}


def to_model(settings: Settings) -> dict[str, Any]:
    layers = range(settings["num_hidden_layers"])
    has_rope, step = rotated_layers(settings), settings.get("interleave_moe_layer_step", 1)
    types = _layer_types(has_rope)
    if (settings.get("layer_types") or types) != types:
        raise UnsupportedError("unsupported layer_types (supported: chunked_attention in the layers with RoPE)")
    mixtures = settings.get("moe_layers")
    mixtures = [i for i in layers if (i + 1) % step == 0] if mixtures is None else mixtures
    names = [f"{'local' if has_rope[i] else 'global'}{'' if i in mixtures else '_dense'}" for i in layers]
    kinds = {name: _kind(settings, name) for name in dict.fromkeys(names)}
    return {
        **sizes(settings, NAMES),
        "head": head(settings, tied=False),
        "kinds": kinds,
        "pattern": pattern_of(names),
    }


def _layer_types(has_rope: list[bool]) -> list[str]:
    return ["chunked_attention" if is_rotated else "full_attention" for is_rotated in has_rope]


def _kind(settings: Settings, name: str) -> dict[str, Any]:
    function = activation(settings["hidden_act"])
    if name.startswith("local"):
        qk_norm = "head_plain" if settings.get("use_qk_norm", True) else "none"
        rope_values = {**rope(settings), "pairs": "neighbours"}
        if rope_values.get("kind") == "yarn":
            # Norms after the rotation would undo its attention factor.
            raise UnsupportedError("unsupported rope_type=yarn (supported: default, linear, llama3)")
        attention: dict[str, Any] = {
            "chunk": settings.get("attention_chunk_size", 8192),
            "qk_norm": qk_norm,
            "rope": rope_values,
        }
    else:
        attention = {"rope": {"kind": "none"}}
        if settings.get("attn_temperature_tuning", True):
            scale, floor = settings.get("attn_scale", 0.1), settings.get("floor_scale", 8192)
            attention["temperature"] = {"floor": floor, "scale": scale}
    attention["bias"] = "all" if settings.get("attention_bias") else "none"
    if name.endswith("dense"):
        return {"attention": attention, "mlp": {"activation": function}}
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": settings["intermediate_size"],
        "activation": function,
        "router": {"scores": "sigmoid", "normalize": False, "scaled": "input"},
        "shared": {"dim": settings["intermediate_size"]},
    }
    return {"attention": attention, "feed_forward": "moe", "moe": moe}


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    uses_rope = [kind.attention.rope.kind is not config.RopeKind.none for kind in kinds]
    is_mixture = [kind.feed_forward is config.FeedForward.moe for kind in kinds]
    if not any(uses_rope) or not any(is_mixture):
        return None
    local, mixture = kinds[uses_rope.index(True)].attention, kinds[is_mixture.index(True)].moe
    unrotated = [kind.attention.temperature for kind, has_rope in zip(kinds, uses_rope, strict=True) if not has_rope]
    temperatures = [temperature for temperature in unrotated if temperature.floor is not None]
    return {
        **size_settings(model, NAMES),
        **rope_settings(local.rope),
        "hidden_act": activation_setting(mixture.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        "no_rope_layers": [int(has_rope) for has_rope in uses_rope],
        "layer_types": _layer_types(uses_rope),
        "moe_layers": [index for index, is_moe in enumerate(is_mixture) if is_moe],
        "attention_bias": local.bias is config.AttentionBias.all,
        "use_qk_norm": local.qk_norm is config.QkNorm.head_plain,
        "attention_chunk_size": local.chunk,
        "attn_temperature_tuning": bool(temperatures),
        **({"floor_scale": temperatures[0].floor, "attn_scale": temperatures[0].scale} if temperatures else {}),
        "intermediate_size": mixture.dim or model.mlp_dim,
        "num_local_experts": mixture.experts,
        "num_experts_per_tok": mixture.top_k,
    }


TABLE = Table(
    hf_types={"llama4_text": "Llama4ForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
