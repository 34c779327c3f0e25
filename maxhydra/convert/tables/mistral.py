"""Mistral 7B (Jiang et al., 2023): Llama's tensor names, and a sliding window."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama


def to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model(settings)
    values["kinds"]["layer"]["attention"]["window"] = settings.get("sliding_window")
    return values


def to_settings(model: config.Model) -> Settings | None:
    settings = llama.to_settings(model)
    assert settings is not None
    return {**settings, "sliding_window": model.kinds[model.pattern[0]].attention.window}


TABLE = Table(
    hf_types={"mistral": "MistralForCausalLM"},
    layer=llama.LAYER,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
