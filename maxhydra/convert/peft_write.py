"""An adapter of ours as a folder that PEFT loads: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from maxhydra.convert.fill import Place, places
from maxhydra.convert.table import Table
from maxhydra.model import ModelDef

Tree = Any
# What PEFT puts before the names of the model it wraps.
WRAPPED = "base_model.model."


def write_peft(folder: Path, model: ModelDef, trained: Tree, *, table: Table, base: str) -> None:
    """Write a folder that is there and empty. `trained`: the adapter's weights; `base`: where the model's own lie."""
    adapter = model.adapter
    assert adapter is not None
    modules: list[str] = []
    tensors: dict[str, np.ndarray] = {}
    for place in places(table, model.base) or ():
        for layer, a, b in _additions(trained, place):
            modules.append(place.weight.hf.removesuffix(".weight").format(layer=layer))
            rank = a.shape[-1]
            tensors[f"{WRAPPED}{modules[-1]}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
            tensors[f"{WRAPPED}{modules[-1]}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank,
        "lora_alpha": adapter.alpha,
        "lora_dropout": adapter.dropout,
        "target_modules": modules,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    (folder / "adapter_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})


def _additions(trained: Tree, place: Place) -> Iterator[tuple[int | None, np.ndarray, np.ndarray]]:
    """Layer, a and b of what the adapter adds to an array; nothing where it adds nothing."""
    node = trained
    for key in (*place.keys[:-1], "lora"):
        node = node.get(key, {})
    if node:
        a, b = np.asarray(node["a"]), np.asarray(node["b"])
        for at, layer in enumerate(place.layers):
            yield (layer, a[at], b[at]) if place.is_stacked else (layer, a, b)
