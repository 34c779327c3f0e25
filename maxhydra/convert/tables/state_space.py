"""Models of Mamba-2 and attention layers: Granite 4 (IBM, 2025) and Nemotron-H (NVIDIA, 2025).

Granite: a feed-forward after every mixer, dense or an MoE with a shared expert, and constant multipliers. Nemotron-H:
every layer is a single branch, a mixer, a plain MLP or an MoE of plain MLPs with the router of DeepSeek-V3. Those of
Nemotron 3 Super have their routed experts on a projection of the residual stream.
"""

import dataclasses
import math
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
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
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import deepseek, llama

RECURRENT = "linear_attention"
SSM = "attention/skip"
# Names of layer types in files of earlier versions of transformers.
OLD_TYPES = {"mamba": RECURRENT, "attention": FULL}


def ssm_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of a Mamba-2 layer."""
    projections = [f"attention/{name}" for name in ("gate", "value", "key", "query", "step")]
    filters = [f"attention/{name}_filter" for name in ("value", "key", "query")]
    return (
        Weight(tuple(f"{path}/kernel" for path in projections), prefix + "in_proj.weight", requires=SSM),
        Weight(tuple(f"{path}/bias" for path in projections), prefix + "in_proj.bias", inputs=0, requires=SSM),
        Weight(tuple(f"{path}/kernel" for path in filters), prefix + "conv1d.weight", singleton_axis=1, requires=SSM),
        Weight(tuple(f"{path}/bias" for path in filters), prefix + "conv1d.bias", inputs=0, requires=SSM),
        Weight("attention/log_speed", prefix + "A_log", requires=SSM),
        Weight("attention/step_bias", prefix + "dt_bias", requires=SSM),
        Weight(SSM, prefix + "D"),
        Weight("attention/norm_scale", prefix + "norm.weight", inputs=2),
        Weight("attention/out/kernel", prefix + "out_proj.weight", inputs=2, requires=SSM),
        Weight("attention/out/bias", prefix + "out_proj.bias", inputs=0, requires=SSM),
    )


def layer_types(names: list[str], supported: tuple[str, ...]) -> list[str]:
    """The type of every layer under its current name."""
    types = [OLD_TYPES.get(name, name) for name in names]
    if unknown := [name for name in types if name not in supported]:
        raise UnsupportedError(f"unsupported layer type {unknown[0]} (supported: {', '.join(supported)})")
    return types


def first_kind(kinds: list[config.Kind], mixer: config.Mixer) -> config.Kind:
    """The first kind with this mixer; the first of all if none has it."""
    return next((kind for kind in kinds if kind.mixer is mixer), kinds[0])


HF = llama.HF
MOE, SHARED = HF + "block_sparse_moe.", HF + "shared_mlp."
GATE_UP = "mlp/gate/kernel", "mlp/up/kernel"
GRANITE_LAYER = (
    *(dataclasses.replace(row, excludes=SSM) for row in (*llama.MIXER, *llama.BIASES) if "norm" not in row.paths[0]),
    *(row for row in llama.MIXER if "norm" in row.paths[0]),
    *ssm_rows(HF + "mamba."),
    Weight(GATE_UP, SHARED + "input_linear.weight"),
    Weight("mlp/down/kernel", SHARED + "output_linear.weight"),
    Weight("mlp/router/kernel", MOE + "router.layer.weight"),
    Weight(("mlp/experts/gate/kernel", "mlp/experts/up/kernel"), MOE + "input_linear.weight", leading=1),
    Weight("mlp/experts/down/kernel", MOE + "output_linear.weight", leading=1),
    Weight(("mlp/shared/gate/kernel", "mlp/shared/up/kernel"), SHARED + "input_linear.weight"),
    Weight("mlp/shared/down/kernel", SHARED + "output_linear.weight"),
)
GRANITE_SSM = {
    "num_heads": "mamba_n_heads",
    "num_groups": "mamba_n_groups",
    "state_dim": "mamba_d_state",
    "taps": "mamba_d_conv",
    "filter_bias": "mamba_conv_bias",
    "bias": "mamba_proj_bias",
}
MULTIPLIERS = {
    "embedding": "embedding_multiplier",
    "branch": "residual_multiplier",
    "logit_divisor": "logits_scaling",
}


def granite_ssm(settings: Settings) -> dict[str, Any]:
    """Values of `model.kinds.*.ssm`."""
    require_silu(settings, "hidden_act")
    limits = settings.get("time_step_limit") or (0.0, math.inf)
    # JSON has no infinity: files hold {"__float__": "Infinity"}, the word, or no value.
    highest = limits[1].get("__float__") if isinstance(limits[1], dict) else limits[1]
    if highest is not None and float(highest) != math.inf:
        raise UnsupportedError(f"unsupported time_step_limit[1]={highest} (supported: infinity)")
    heads, width = settings["mamba_n_heads"], settings.get("mamba_expand", 2) * settings["hidden_size"]
    size = settings.get("mamba_d_head", "auto")
    return {
        **{key: settings[hf_key] for key, hf_key in GRANITE_SSM.items() if settings.get(hf_key) is not None},
        "head_dim": width // heads if size == "auto" else size,
        "min_step": float(limits[0]),
    }


def granite_mlp(settings: Settings) -> dict[str, Any]:
    """Values of the feed-forward: an MoE with a shared expert, or only the latter."""
    function = activation(settings["hidden_act"])
    if not settings.get("num_local_experts"):
        return {"mlp": {"activation": function}}
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": settings["intermediate_size"],
        "activation": function,
        "router": {"scores": "softmax_of_chosen"},
        "shared": {"dim": settings["shared_intermediate_size"]},
    }
    return {"feed_forward": "moe", "moe": moe}


def granite_to_model(settings: Settings) -> dict[str, Any]:
    count, is_mixture = settings["num_hidden_layers"], bool(settings.get("num_local_experts"))
    names = settings.get("layer_types") or settings.get("layers_block_type") or [RECURRENT] * count
    types = layer_types(list(names), (RECURRENT, FULL))
    if (positions := settings.get("position_embedding_type")) not in (None, "rope", "nope"):
        raise UnsupportedError(f"unsupported position_embedding_type={positions} (supported: null, rope)")
    attention = {
        "scale": float(settings.get("attention_multiplier", 1.0)),
        "bias": "all" if settings.get("attention_bias") else "none",
        "rope": rope(settings) if positions == "rope" else {"kind": "none"},
    }
    mlp = granite_mlp(settings)
    kinds = {"attention": {"attention": attention, **mlp}}
    if RECURRENT in types:
        kinds["ssm"] = {"mixer": "ssm", "ssm": granite_ssm(settings), **mlp}
    used = ["ssm" if name == RECURRENT else "attention" for name in types]
    width = "intermediate_size" if is_mixture else "shared_intermediate_size"
    return {
        **sizes({**settings, "intermediate_size": settings[width]}),
        "head": head(settings, tied=False),
        "multipliers": {key: float(settings.get(hf_key, 1.0)) for key, hf_key in MULTIPLIERS.items()},
        "kinds": {name: kinds[name] for name in dict.fromkeys(used)},
        "pattern": pattern_of(used),
    }


def granite_to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    full, state = (first_kind(kinds, mixer) for mixer in (config.Mixer.attention, config.Mixer.ssm))
    moe, ssm = kinds[0].moe, state.ssm
    heads, size = ssm.num_heads or model.num_heads, ssm.head_dim or model.head_dim
    is_rotated = full.attention.rope.kind is not config.RopeKind.none
    is_mixture = kinds[0].feed_forward is config.FeedForward.moe
    if state.mixer is config.Mixer.ssm and heads * size % model.emb_dim:
        return None
    return {
        **size_settings(model),
        **(rope_settings(full.attention.rope) if is_rotated else {}),
        "layer_types": [RECURRENT if kind.mixer is config.Mixer.ssm else FULL for kind in kinds],
        "position_embedding_type": "rope" if is_rotated else None,
        "attention_multiplier": full.attention.scale or model.head_dim**-0.5,
        "attention_bias": full.attention.bias is config.AttentionBias.all,
        "hidden_act": activation_setting(moe.activation if is_mixture else kinds[0].mlp.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        **{hf_key: getattr(model.multipliers, key) for key, hf_key in MULTIPLIERS.items()},
        "num_local_experts": moe.experts if is_mixture else 0,
        "num_experts_per_tok": moe.top_k if is_mixture else 0,
        "intermediate_size": (moe.dim or model.mlp_dim) if is_mixture else model.mlp_dim,
        "shared_intermediate_size": moe.shared.dim if is_mixture else model.mlp_dim,
        **{hf_key: getattr(ssm, key) for key, hf_key in GRANITE_SSM.items()},
        "mamba_n_heads": heads,
        "mamba_d_head": size,
        "mamba_expand": max(1, heads * size // model.emb_dim),
        "time_step_limit": [ssm.min_step, {"__float__": "Infinity"}],
    }


GRANITE = Table(
    hf_types={"granitemoehybrid": "GraniteMoeHybridForCausalLM"},
    layer=GRANITE_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=granite_to_model,
    to_settings=granite_to_settings,
)


BACKBONE = "backbone.layers.{layer}."
BRANCH = BACKBONE + "mixer."
EXPERT = BRANCH + "experts.{expert}."
NEMOTRON_LAYER = (
    Weight("attention_norm/scale", BACKBONE + "norm.weight"),
    Weight("mlp_norm/scale", BACKBONE + "norm.weight"),
    *ssm_rows(BRANCH),
    Weight("attention/query/kernel", BRANCH + "q_proj.weight", excludes=SSM),
    Weight("attention/key/kernel", BRANCH + "k_proj.weight", excludes=SSM),
    Weight("attention/value/kernel", BRANCH + "v_proj.weight", excludes=SSM),
    Weight("attention/out/kernel", BRANCH + "o_proj.weight", inputs=2, excludes=SSM),
    *(Weight(f"mlp/{name}/kernel", BRANCH + f"{name}_proj.weight") for name in ("up", "down")),
    *(Weight(f"mlp/{name}/bias", BRANCH + f"{name}_proj.bias", inputs=0) for name in ("up", "down")),
    Weight("mlp/router/kernel", BRANCH + "gate.weight"),
    Weight("mlp/router/correction", BRANCH + "gate.e_score_correction_bias"),
    *(Weight(f"mlp/experts/{name}/kernel", EXPERT + f"{name}_proj.weight") for name in ("up", "down")),
    *(Weight(f"mlp/shared/{name}/kernel", BRANCH + f"shared_experts.{name}_proj.weight") for name in ("up", "down")),
    Weight("mlp/latent_down/kernel", BRANCH + "fc1_latent_proj.weight"),
    Weight("mlp/latent_up/kernel", BRANCH + "fc2_latent_proj.weight"),
)
NEMOTRON_NON_LAYER = (
    Weight("embedding/table", "backbone.embeddings.weight", transposed=False),
    Weight("final_norm/scale", "backbone.norm_f.weight"),
    Weight("head/kernel", "lm_head.weight"),
)
# layers_block_type -> kind, and the letters of hybrid_override_pattern in files of earlier versions.
NEMOTRON_KINDS = {RECURRENT: "ssm", FULL: "attention", "mlp": "mlp", "moe": "moe"}
LETTERS = {"M": RECURRENT, "*": FULL, "-": "mlp", "E": "moe"}
NEMOTRON_SIZES = {key: name for key, name in SIZES.items() if key != "num_layers"} | {"norm_eps": "layer_norm_epsilon"}
NEMOTRON_SSM = {
    "num_heads": "mamba_num_heads",
    "head_dim": "mamba_head_dim",
    "num_groups": "n_groups",
    "state_dim": "ssm_state_size",
    "taps": "conv_kernel",
    "filter_bias": "use_conv_bias",
    "bias": "use_bias",
    "min_step": "time_step_min",
}


def nemotron_moe(settings: Settings) -> dict[str, Any]:
    """Values of `model.kinds.*.moe`. The number of shared experts has no effect in transformers."""
    if settings.get("mlp_bias"):
        raise UnsupportedError("unsupported mlp_bias=true of moe layers, which no published model uses")
    return {
        "experts": settings["n_routed_experts"],
        "top_k": settings["num_experts_per_tok"],
        "kind": "plain",
        "dim": settings["moe_intermediate_size"],
        "latent_dim": settings.get("moe_latent_size"),
        "activation": activation(settings.get("mlp_hidden_act", "relu2")),
        "router": deepseek.router(settings),
        "shared": {"dim": settings["moe_shared_expert_intermediate_size"]},
    }


def nemotron_moe_settings(model: config.Model, moe: config.Moe) -> Settings:
    """Inverse of `nemotron_moe`."""
    return {
        "n_routed_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.dim or model.mlp_dim,
        "moe_latent_size": moe.latent_dim,
        "mlp_hidden_act": activation_setting(moe.activation),
        "moe_shared_expert_intermediate_size": moe.shared.dim,
        "n_shared_experts": 1,
        "routed_scaling_factor": moe.router.scale,
        **deepseek.router_settings(moe.router),
    }


def nemotron_to_model(settings: Settings) -> dict[str, Any]:
    pattern = settings.get("hybrid_override_pattern") or ""
    given = settings.get("layers_block_type") or settings.get("layer_types")
    types = layer_types(list(given or (LETTERS.get(letter, letter) for letter in pattern)), tuple(NEMOTRON_KINDS))
    if not types:
        raise KeyError("layers_block_type")
    require_silu(settings, "mamba_hidden_act")
    ssm = {key: settings[hf_key] for key, hf_key in NEMOTRON_SSM.items() if settings.get(hf_key) is not None}
    function = activation(settings.get("mlp_hidden_act", "relu2"))
    mlp = {"kind": "plain", "activation": function, "bias": bool(settings.get("mlp_bias"))}
    kinds: dict[str, Any] = {
        "ssm": {"mixer": "ssm", "ssm": {"min_step": 0.001, **ssm}, "feed_forward": "none"},
        "attention": {"attention": {"rope": {"kind": "none"}}, "feed_forward": "none"},
        "mlp": {"mixer": "none", "mlp": mlp},
    }
    if "moe" in types:
        kinds["moe"] = {"mixer": "none", "feed_forward": "moe", "moe": nemotron_moe(settings)}
    names = [NEMOTRON_KINDS[name] for name in types]
    return {
        "num_layers": len(names),
        **sizes(settings, NEMOTRON_SIZES),
        # transformers ignores tie_word_embeddings.
        "head": "separate",
        "kinds": {name: kinds[name] for name in dict.fromkeys(names)},
        "pattern": pattern_of(names),
    }


def nemotron_to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    ssm = first_kind(kinds, config.Mixer.ssm).ssm
    branches = {kind.feed_forward: kind for kind in reversed(kinds) if kind.mixer is config.Mixer.none}
    mlp = branches.get(config.FeedForward.mlp, kinds[0]).mlp
    moe = branches[config.FeedForward.moe].moe if config.FeedForward.moe in branches else None
    types = {config.Mixer.ssm: RECURRENT, config.Mixer.attention: FULL}
    if any(kind.mixer not in (*types, config.Mixer.none) for kind in kinds):
        return None
    return {
        **size_settings(model, NEMOTRON_SIZES),
        "layers_block_type": [types.get(kind.mixer, kind.feed_forward.value) for kind in kinds],
        **{hf_key: getattr(ssm, key) for key, hf_key in NEMOTRON_SSM.items()},
        "mamba_num_heads": ssm.num_heads or model.num_heads,
        "mamba_head_dim": ssm.head_dim or model.head_dim,
        "mlp_hidden_act": activation_setting(mlp.activation),
        "mlp_bias": mlp.bias,
        "tie_word_embeddings": False,
        **({} if moe is None else nemotron_moe_settings(model, moe)),
    }


NEMOTRON = Table(
    hf_types={"nemotron_h": "NemotronHForCausalLM"},
    layer=NEMOTRON_LAYER,
    non_layer=NEMOTRON_NON_LAYER,
    to_model=nemotron_to_model,
    to_settings=nemotron_to_settings,
    ignored=("*.rotary_emb.inv_freq", "mtp.*"),
    renamed={"model.": "backbone."},
)

TABLES = (GRANITE, NEMOTRON)
