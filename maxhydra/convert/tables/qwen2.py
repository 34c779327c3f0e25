"""Qwen2 and Qwen2.5 (2024): Llama with biases on queries, keys and values; the last layers may have windows."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.kinds import FULL, WINDOWED, arranged, window_settings
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama


def windowed(settings: Settings, model: dict[str, Any]) -> dict[str, Any]:
    """Llama's model with windows in the layers that are to have them."""
    if not settings.get("use_sliding_window"):
        return model
    layer = model["kinds"]["layer"]
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    first = settings.get("max_window_layers", 0)
    usual = [FULL if place < first else WINDOWED for place in range(model["num_layers"])]
    types = settings.get("layer_types") or usual
    return model | arranged(types, windowed=local, full=layer)


def to_model(settings: Settings) -> dict[str, Any]:
    found = llama.to_model(settings)
    found["kinds"]["layer"]["attention"]["bias"] = "qkv"
    return windowed(settings, found)


def to_settings(model: config.Model) -> Settings | None:
    settings, windows = llama.to_settings(model), window_settings(model)
    assert settings is not None
    return {**settings, **windows, "use_sliding_window": windows["sliding_window"] is not None}


TABLE = Table(
    hf_types={"qwen2": "Qwen2ForCausalLM"},
    layer=llama.LAYER + llama.BIASES,
    ends=llama.ENDS,
    to_model=to_model,
    to_settings=to_settings,
)
