"""Kimi Linear (Moonshot AI, 2025): delta rule with a decay per channel, MLA without RoPE, and an MoE."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import (
    FULL,
    activation,
    activation_setting,
    head,
    layer_kinds,
    pattern_of,
    size_settings,
    sizes,
)
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import deepseek, llama

HF = llama.HF
RECURRENT, DENSE, SPARSE = "linear_attention", "dense", "sparse"
DELTA, LATENT = "attention/log_speed", "attention/latent/kernel"
ATTENTION, MOE = HF + "self_attn.", HF + "block_sparse_moe."
MATRICES = {"gate": "w1", "up": "w3", "down": "w2"}
LAYER = (
    *(row for row in llama.MIXER if "norm" in row.paths[0]),
    *(
        Weight(f"attention/{name}/kernel", ATTENTION + f"{name[0]}_proj.weight", requires=DELTA)
        for name in ("query", "key", "value")
    ),
    *(
        Weight(f"attention/{name}_filter/kernel", ATTENTION + f"{name[0]}_conv1d.weight", singleton_axis=1)
        for name in ("query", "key", "value")
    ),
    *(
        Weight(f"attention/{name}/{part}/kernel", ATTENTION + f"{letter}_{suffix}_proj.weight")
        for name, letter in (("decay", "f"), ("gate", "g"))
        for part, suffix in (("down", "a"), ("up", "b"))
    ),
    Weight("attention/rate/kernel", ATTENTION + "b_proj.weight"),
    Weight(DELTA, ATTENTION + "A_log", singleton_axis=(0, 1, 3)),
    Weight("attention/step_bias", ATTENTION + "dt_bias", inputs=2),
    Weight("attention/norm/scale", ATTENTION + "o_norm.weight"),
    Weight("attention/out/kernel", ATTENTION + "o_proj.weight", inputs=2),
    Weight("attention/query/kernel", ATTENTION + "q_proj.weight", requires=LATENT),
    Weight("attention/query_down/kernel", ATTENTION + "q_a_proj.weight"),
    Weight("attention/query_norm/scale", ATTENTION + "q_a_layernorm.weight"),
    Weight("attention/query_up/kernel", ATTENTION + "q_b_proj.weight"),
    Weight(LATENT, ATTENTION + "kv_a_proj_with_mqa.weight"),
    Weight("attention/latent_norm/scale", ATTENTION + "kv_a_layernorm.weight"),
    Weight("attention/key_value/kernel", ATTENTION + "kv_b_proj.weight"),
    *(Weight(f"mlp/{name}/kernel", MOE + f"{name}_proj.weight") for name in MATRICES),
    Weight("mlp/router/kernel", MOE + "gate.weight"),
    Weight("mlp/router/correction", MOE + "gate.e_score_correction_bias"),
    *(
        Weight(f"mlp/experts/{name}/kernel", MOE + "experts.{expert}." + f"{hf}.weight")
        for name, hf in MATRICES.items()
    ),
    *(Weight(f"mlp/shared/{name}/kernel", MOE + f"shared_experts.{name}_proj.weight") for name in MATRICES),
)
# Names that files use -> those of other families.
SAME = {
    "model_max_length": "max_position_embeddings",
    "moe_renormalize": "norm_topk_prob",
    "num_expert_group": "n_group",
    "num_experts": "num_local_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "num_shared_experts": "n_shared_experts",
}


def with_common_names(settings: Settings) -> Settings:
    """The settings under the names of other families, with the layers and sizes of published files spelled out."""
    renamed = {SAME.get(key, key): value for key, value in settings.items()}
    linear, count = settings.get("linear_attn_config") or {}, settings["num_hidden_layers"]
    types = [FULL if index and index % 4 == 0 else RECURRENT for index in range(count)]
    if "full_attn_layers" in linear:
        types = [FULL if index + 1 in linear["full_attn_layers"] else RECURRENT for index in range(count)]
    dense = settings.get("first_k_dense_replace", 1)
    defaults = {
        "layer_types": types,
        "mlp_layer_types": [DENSE if index < dense else SPARSE for index in range(count)],
        "linear_head_dim": linear.get("head_dim", 128),
        "linear_num_heads": linear.get("num_heads", 32),
        "linear_conv_kernel_dim": linear.get("short_conv_kernel_size", 4),
    }
    return {**defaults, **{key: value for key, value in renamed.items() if value is not None}}


def to_model(settings: Settings) -> dict[str, Any]:
    settings = with_common_names(settings)
    size, heads = settings["linear_head_dim"], settings["linear_num_heads"]
    delta = {
        "num_key_heads": heads,
        "num_value_heads": heads,
        "key_dim": size,
        "value_dim": size,
        "taps": settings["linear_conv_kernel_dim"],
        "decay_rank": size,
        "gate": "sigmoid",
        "gate_rank": size,
    }
    mixers: dict[str, dict[str, Any]] = {
        RECURRENT: {"mixer": "delta", "delta": delta},
        FULL: {"mixer": "mla", "mla": {**deepseek.mla_values(settings), "rope": {"kind": "none"}}},
    }
    function, dim = activation(settings.get("hidden_act", "silu")), settings["moe_intermediate_size"]
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "dim": dim,
        "activation": function,
        "router": deepseek.router(settings),
        "shared": {"dim": dim * settings["n_shared_experts"]} if settings.get("n_shared_experts") else {},
    }
    mlps: dict[str, dict[str, Any]] = {
        DENSE: {"mlp": {"activation": function}},
        SPARSE: {"feed_forward": "moe", "moe": moe},
    }
    names, kinds = [], {}
    for mixer, mlp in zip(settings["layer_types"], settings["mlp_layer_types"], strict=True):
        if mixer not in mixers or mlp not in mlps:
            supported = f"{', '.join(mixers)}; {', '.join(mlps)}"
            raise UnsupportedError(f"unsupported layer type {mixer} with {mlp} (supported: {supported})")
        name = ("delta" if mixer == RECURRENT else "latent") + ("_dense" if mlp == DENSE else "")
        kinds[name] = {**mixers[mixer], **mlps[mlp]}
        names.append(name)
    dense = next((index for index, name in enumerate(names) if not name.endswith("_dense")), len(names))
    return {
        **sizes({**settings, "head_dim": settings["qk_nope_head_dim"]}),
        "head": head(settings, tied=False),
        "kinds": kinds,
        "prefix": names[:dense],
        "pattern": pattern_of(names[dense:]),
    }


def to_settings(model: config.Model) -> Settings | None:
    kinds = layer_kinds(model)
    state = next((kind for kind in kinds if kind.mixer is config.Mixer.delta), None)
    full = next((kind for kind in kinds if kind.mixer is config.Mixer.mla), None)
    mixture = next((kind for kind in kinds if kind.feed_forward is config.FeedForward.moe), None)
    if state is None or full is None or mixture is None:
        return None
    delta, mla, moe, router = state.delta, full.mla, mixture.moe, mixture.moe.router
    names = {other: own for own, other in SAME.items()}
    common = {
        **size_settings(model),
        "head_dim": mla.qk_rope_head_dim,
        "layer_types": [RECURRENT if kind.mixer is config.Mixer.delta else FULL for kind in kinds],
        "mlp_layer_types": [SPARSE if kind.feed_forward is config.FeedForward.moe else DENSE for kind in kinds],
        "linear_head_dim": delta.key_dim,
        "linear_num_heads": delta.num_value_heads,
        "linear_conv_kernel_dim": delta.taps,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_nope_head_dim": mla.qk_nope_head_dim or model.head_dim,
        "qk_rope_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim or model.head_dim,
        "hidden_act": activation_setting(moe.activation),
        "tie_word_embeddings": model.head is config.Head.tied,
        # The default is a token of the published vocabulary, which a smaller one does not have.
        "pad_token_id": None,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "moe_intermediate_size": moe.dim or model.mlp_dim,
        "n_shared_experts": (moe.shared.dim or 0) // (moe.dim or model.mlp_dim),
        "norm_topk_prob": router.normalize,
        "routed_scaling_factor": router.scale,
        "n_group": router.groups,
        "topk_group": router.top_groups,
    }
    return {names.get(key, key): value for key, value in common.items()}


TABLE = Table(
    hf_types={"kimi_linear": "KimiLinearForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
    renamed={".mlp.": ".block_sparse_moe."},
)
