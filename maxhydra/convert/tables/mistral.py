"""Mistral 7B (Jiang et al., 2023), Mixtral (Jiang et al., 2024) and Mistral 4 (Mistral AI, 2026).

Mistral: Llama's tensor names, and a sliding window. Mixtral: Mistral with MoE layers. Mistral 4: the layers of
DeepSeek-V2 with a query temperature, and one tensor for all experts of a layer.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, Table, UnsupportedError, Weight
from maxhydra.convert.tables import deepseek, llama


def mistral_to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model(settings)
    values["kinds"]["layer"]["attention"]["window"] = settings.get("sliding_window")
    return values


def mistral_to_settings(model: config.Model) -> Settings | None:
    settings = llama.to_settings(model)
    assert settings is not None
    return {**settings, "sliding_window": model.kinds[model.pattern[0]].attention.window}


MISTRAL = Table(
    hf_types={"mistral": "MistralForCausalLM"},
    layer=llama.LAYER,
    non_layer=llama.NON_LAYER,
    to_model=mistral_to_model,
    to_settings=mistral_to_settings,
)


MIXTRAL_MOE = llama.HF + "block_sparse_moe."
MIXTRAL_LAYER = (
    *llama.MIXER,
    Weight("mlp/router/kernel", MIXTRAL_MOE + "gate.weight"),
    Weight("mlp/experts/gate/kernel", MIXTRAL_MOE + "experts.{expert}.w1.weight"),
    Weight("mlp/experts/up/kernel", MIXTRAL_MOE + "experts.{expert}.w3.weight"),
    Weight("mlp/experts/down/kernel", MIXTRAL_MOE + "experts.{expert}.w2.weight"),
)


def mixtral_to_model(settings: Settings) -> dict[str, Any]:
    values = mistral_to_model(settings)
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "activation": activation(settings["hidden_act"]),
    }
    layer = {"attention": values["kinds"]["layer"]["attention"], "feed_forward": "moe", "moe": moe}
    return {**values, "kinds": {"layer": layer}}


def mixtral_to_settings(model: config.Model) -> Settings | None:
    settings, moe = mistral_to_settings(model), model.kinds[model.pattern[0]].moe
    assert settings is not None
    return {
        **settings,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "hidden_act": activation_setting(moe.activation),
    }


MIXTRAL = Table(
    hf_types={"mixtral": "MixtralForCausalLM"},
    layer=MIXTRAL_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=mixtral_to_model,
    to_settings=mixtral_to_settings,
)


MISTRAL4_EXPERTS = llama.HF + "mlp.experts."
MISTRAL4_LAYER = (
    *(row for row in deepseek.DEEPSEEK_V2_LAYER if not row.is_by_expert),
    Weight(("mlp/experts/gate/kernel", "mlp/experts/up/kernel"), MISTRAL4_EXPERTS + "gate_up_proj", leading=1),
    Weight("mlp/experts/down/kernel", MISTRAL4_EXPERTS + "down_proj", leading=1),
)
# RoPE of files that have none.
MISTRAL4_ROPE = {
    "rope_type": "yarn",
    "factor": 128.0,
    "original_max_position_embeddings": 8192,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def mistral4_to_model(settings: Settings) -> dict[str, Any]:
    if (model_type := settings.get("model_type", "mistral4")) != "mistral4":
        raise UnsupportedError(f"a text decoder of model_type={model_type} (supported: mistral4)")
    # The rotated share follows from qk_rope_head_dim.
    parameters = {**(settings.get("rope_parameters") or settings.get("rope_scaling") or MISTRAL4_ROPE)}
    parameters.pop("partial_rotary_factor", None)
    mla = deepseek.mla_values(
        {**settings, "rope_parameters": parameters, "partial_rotary_factor": None},
        interleaved_rope=settings.get("rope_interleave", True),
    )
    mla["temperature"] = {
        "floor": parameters["original_max_position_embeddings"],
        "scale": parameters["llama_4_scaling_beta"],
        "offset": 0,
    }
    router = {**deepseek.router(settings), "scores": "softmax", "bias_rate": None}
    return deepseek.model_values(settings, mla, router)


def mistral4_to_settings(model: config.Model) -> Settings | None:
    mixture = deepseek.moe_kind(model)
    if mixture is None or mixture.mla.temperature.floor is None:
        return None
    settings, temperature = deepseek.shared_settings(model, mixture), mixture.mla.temperature
    parameters = {
        "rope_type": "default",
        "rope_theta": settings.pop("rope_theta"),
        **(settings.pop("rope_scaling") or {}),
        "original_max_position_embeddings": temperature.floor,
        "llama_4_scaling_beta": temperature.scale,
    }
    return {
        **settings,
        # Of queries and keys; qk_rope_head_dim in other families.
        "head_dim": settings["qk_nope_head_dim"] + settings["qk_rope_head_dim"],
        "rope_parameters": parameters,
        "rope_interleave": mixture.mla.rope.pairs is config.Pairs.neighbours,
        **deepseek.router_settings(mixture.moe.router),
    }


MISTRAL4 = Table(
    hf_types={"mistral4": "Mistral4ForCausalLM"},
    layer=MISTRAL4_LAYER,
    non_layer=llama.NON_LAYER,
    to_model=mistral4_to_model,
    to_settings=mistral4_to_settings,
)

TABLES = (MISTRAL, MIXTRAL, MISTRAL4)
