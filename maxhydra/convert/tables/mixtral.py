"""Mixtral (Jiang et al., 2024): Mistral with MoE layers."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import llama, mistral

MOE = llama.HF + "block_sparse_moe."
LAYER = (
    *llama.MIXER,
    Weight("mlp/router/kernel", MOE + "gate.weight"),
    Weight("mlp/experts/gate/kernel", MOE + "experts.{expert}.w1.weight"),
    Weight("mlp/experts/up/kernel", MOE + "experts.{expert}.w3.weight"),
    Weight("mlp/experts/down/kernel", MOE + "experts.{expert}.w2.weight"),
)


def to_model(settings: Settings) -> dict[str, Any]:
    values = mistral.to_model(settings)
    moe = {
        "experts": settings["num_local_experts"],
        "top_k": settings["num_experts_per_tok"],
        "activation": activation(settings["hidden_act"]),
    }
    layer = {"attention": values["kinds"]["layer"]["attention"], "feed_forward": "moe", "moe": moe}
    return {**values, "kinds": {"layer": layer}}


def to_settings(model: config.Model) -> Settings | None:
    settings, moe = mistral.to_settings(model), model.kinds[model.pattern[0]].moe
    assert settings is not None
    return {
        **settings,
        "num_local_experts": moe.experts,
        "num_experts_per_tok": moe.top_k,
        "hidden_act": activation_setting(moe.activation),
    }


TABLE = Table(
    hf_types={"mixtral": "MixtralForCausalLM"},
    layer=LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
