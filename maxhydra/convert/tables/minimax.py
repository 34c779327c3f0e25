"""MiniMax-M2 (MiniMax, 2025): Mixtral's tensor names, norms over all query and all key heads, and a sigmoid router."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, head, layer_kinds, rope, sizes
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import llama, mistral

LAYER = (
    *mistral.MIXTRAL_LAYER,
    *llama.QK_NORMS,
    Weight("mlp/router/correction", mistral.MIXTRAL_MOE + "e_score_correction_bias"),
)
# Keys of published files that transformers does not read, and the only values that it implements.
CONSTANT = {"qk_norm_type": "per_layer", "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True}


def to_model(settings: Settings) -> dict[str, Any]:
    for key, value in CONSTANT.items():
        if settings.get(key, value) != value:
            raise UnsupportedError(f"unsupported {key}={settings[key]} (supported: {value})")
    if settings.get("shared_intermediate_size"):
        raise UnsupportedError("unsupported shared_intermediate_size, which no published model uses (supported: 0)")
    model_sizes = sizes(settings)
    share = (settings.get("rotary_dim") or model_sizes["head_dim"]) / model_sizes["head_dim"]
    rope_values = {"share": share, **rope({"rope_theta": 5_000_000.0, **settings}, is_partial=True)}
    attention = {"qk_norm": "whole", "rope": rope_values}
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "activation": activation(settings.get("hidden_act", "silu")),
        "router": {"scores": "sigmoid", "bias_rate": 0.001},
    }
    layer = {"attention": attention, "feed_forward": "moe", "moe": moe}
    return {**model_sizes, "head": head(settings, tied=False), "kinds": {"layer": layer}}


def to_settings(model: config.Model) -> Settings | None:
    settings, kind = mistral.mixtral_to_settings(model), layer_kinds(model)[0]
    assert settings is not None
    rotary_dim = int(model.head_dim * kind.attention.rope.share)
    return {**settings, "rotary_dim": rotary_dim}


TABLE = Table(
    hf_types={"minimax_m2": "MiniMaxM2ForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
