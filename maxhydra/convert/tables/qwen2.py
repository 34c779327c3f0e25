"""Qwen2 and Qwen2.5 (2024): Llama with query, key and value biases; the last layers may have sliding windows."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import FULL, WINDOWED, window_settings, windowed_layers
from maxhydra.convert.name_table import Settings, Table
from maxhydra.convert.tables import llama


def add_windows(settings: Settings, model: dict[str, Any]) -> dict[str, Any]:
    """Add sliding windows to the layers of a Llama-like model that use them."""
    if not settings.get("use_sliding_window"):
        return model
    layer = model["kinds"]["layer"]
    local = {**layer, "attention": {**layer["attention"], "window": settings["sliding_window"]}}
    first = settings.get("max_window_layers", 0)
    default_types = [FULL if layer < first else WINDOWED for layer in range(model["num_layers"])]
    types = settings.get("layer_types") or default_types
    return model | windowed_layers(types, windowed=local, full=layer)


def to_model(settings: Settings) -> dict[str, Any]:
    values = llama.to_model(settings)
    values["kinds"]["layer"]["attention"]["bias"] = "qkv"
    return add_windows(settings, values)


def to_settings(model: config.Model) -> Settings | None:
    settings, windows = llama.to_settings(model), window_settings(model)
    assert settings is not None
    return {**settings, **windows, "use_sliding_window": windows["sliding_window"] is not None}


TABLE = Table(
    hf_types={"qwen2": "Qwen2ForCausalLM"},
    layer=llama.LAYER + llama.BIASES,
    non_layer=llama.NON_LAYER,
    to_model=to_model,
    to_settings=to_settings,
)
