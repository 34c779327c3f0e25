"""OLMo Hybrid (Ai2, 2025): Gated DeltaNet with pre-norms, and attention with post-norms in every fourth layer."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    require_silu,
    rope,
    rope_parameters,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama

HF = llama.HF
DELTA, ATTENTION = "attention/log_speed", "attention/query_norm/scale"
LINEAR = HF + "linear_attn."
PROJECTIONS = {"query": "q", "key": "k", "value": "v", "gate": "g", "rate": "b", "decay": "a"}
LAYER = (
    # The two norms of a layer have the same names in files, though they come before or after the branches.
    Weight("attention_norm/scale", HF + "attention_layer_norm.weight"),
    Weight("mlp_norm/scale", HF + "feedforward_layer_norm.weight"),
    Weight("attention_post_norm/scale", HF + "feedforward_layer_norm.weight"),
    Weight("mlp_post_norm/scale", HF + "post_feedforward_layernorm.weight"),
    *(
        Weight(f"attention/{name}/kernel", LINEAR + f"{letter}_proj.weight", requires=DELTA)
        for name, letter in PROJECTIONS.items()
    ),
    *(
        Weight(f"attention/{name}_filter/kernel", LINEAR + f"{name[0]}_conv1d.weight", singleton_axis=1)
        for name in ("query", "key", "value")
    ),
    Weight(DELTA, LINEAR + "A_log"),
    Weight("attention/step_bias", LINEAR + "dt_bias"),
    Weight("attention/norm/scale", LINEAR + "o_norm.weight"),
    Weight("attention/out/kernel", LINEAR + "o_proj.weight", inputs=2, requires=DELTA),
    *(
        Weight(f"attention/{name}/kernel", HF + f"self_attn.{letter}_proj.weight", inputs=inputs, requires=ATTENTION)
        for name, letter, inputs in (("query", "q", 1), ("key", "k", 1), ("value", "v", 1), ("out", "o", 2))
    ),
    *llama.QK_NORMS,
    *llama.BIASES,
    *llama.MLP,
)
RECURRENT = "linear_attention"
SIZES = {
    "num_key_heads": "linear_num_key_heads",
    "num_value_heads": "linear_num_value_heads",
    "key_dim": "linear_key_head_dim",
    "value_dim": "linear_value_head_dim",
    "taps": "linear_conv_kernel_dim",
}
# Of the norm of the output heads, for any rms_norm_eps.
NORM_EPS = 1e-5
NAMES = {RECURRENT: "delta", FULL: "attention"}


def with_defaults(settings: Settings) -> Settings:
    """The settings with the sizes of Gated DeltaNet that follow from others."""
    heads = settings["num_attention_heads"]
    filled: Settings = {"linear_num_key_heads": heads, "linear_num_value_heads": heads, "linear_conv_kernel_dim": 4}
    filled |= {key: value for key, value in settings.items() if value is not None}
    filled.setdefault("linear_key_head_dim", int(0.75 * settings["hidden_size"] / filled["linear_num_key_heads"]))
    filled.setdefault("linear_value_head_dim", 2 * filled["linear_key_head_dim"])
    count = settings["num_hidden_layers"]
    every_fourth = [FULL if index % 4 == 3 else RECURRENT for index in range(count)]
    filled.setdefault("layer_types", every_fourth if count > 3 else [*every_fourth[:-1], FULL])
    return filled


def to_model(settings: Settings) -> dict[str, Any]:
    filled = with_defaults(settings)
    types = filled["layer_types"]
    if unknown := [name for name in types if name not in NAMES]:
        raise UnsupportedError(f"unsupported layer_types {unknown[0]} (supported: {', '.join(NAMES)})")
    if RECURRENT in types:
        require_silu(settings)
    # A rope_theta of null is a model without RoPE; files without rope_parameters have the default.
    parameters = settings.get("rope_parameters") or {"rope_theta": settings.get("rope_theta", 10000.0)}
    has_rope = parameters.get("rope_theta", 10000.0) is not None
    attention = {
        "qk_norm": "whole",
        "bias": "all" if settings.get("attention_bias") else "none",
        "rope": rope(settings) if has_rope else {"kind": "none"},
    }
    delta = {key: filled[hf_key] for key, hf_key in SIZES.items()}
    delta |= {"max_rate": 2.0 if settings.get("linear_allow_neg_eigval", True) else 1.0, "norm_eps": NORM_EPS}
    mlp = {"mlp": {"activation": activation(settings.get("hidden_act", "silu"))}}
    kinds = {
        "delta": {"mixer": "delta", "delta": delta, **mlp},
        "attention": {"norms": "post", "attention": attention, **mlp},
    }
    names = [NAMES[name] for name in types]
    return {
        **sizes(settings),
        "head": head(settings, tied=False),
        "kinds": {name: kinds[name] for name in dict.fromkeys(names)},
        "pattern": pattern_of(names),
    }


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    full = next((kind for kind in kinds if kind.mixer is config.Mixer.attention), None)
    delta = next((kind for kind in kinds if kind.mixer is config.Mixer.delta), None)
    if full is None or delta is None:
        return None
    has_rope = full.attention.rope.kind is not config.RopeKind.none
    no_rope = {"rope_type": "default", "rope_theta": None}
    return {
        **{key: value for key, value in size_settings(model).items() if key != "head_dim"},
        **{hf_key: getattr(delta.delta, key) for key, hf_key in SIZES.items()},
        "layer_types": [RECURRENT if kind.mixer is config.Mixer.delta else FULL for kind in kinds],
        "linear_allow_neg_eigval": delta.delta.max_rate == 2,
        "rope_parameters": rope_parameters(full.attention.rope) if has_rope else no_rope,
        "attention_bias": full.attention.bias is config.AttentionBias.all,
        "hidden_act": activation_setting(full.mlp.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        # The default is a token of the published vocabulary, which a smaller one does not have.
        "pad_token_id": None,
    }


TABLE = Table(
    hf_types={"olmo_hybrid": "OlmoHybridForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    renamed={
        ".input_layernorm.": ".attention_layer_norm.",
        ".post_attention_layernorm.": ".feedforward_layer_norm.",
    },
)
