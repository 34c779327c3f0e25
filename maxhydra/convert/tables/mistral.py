"""Mistral 7B (Jiang et al., 2023) and Mixtral (Jiang et al., 2024).

Mistral: Llama's tensor names, and a sliding window. Mixtral: Mistral with MoE layers.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import llama


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

TABLES = (MISTRAL, MIXTRAL)
