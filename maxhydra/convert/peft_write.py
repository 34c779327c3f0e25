"""An adapter of ours as a folder that PEFT loads: adapter_config.json and adapter_model.safetensors."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.name_table import Table
from maxhydra.convert.param_map import Place, map_params
from maxhydra.model import ModelDef
from maxhydra.model.param_partition import ADAPTER

Tree = Any
# What PEFT puts before the names of the model it wraps.
WRAPPED = "base_model.model."
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"


def write_peft(folder: Path, model: ModelDef, trained: Tree, *, table: Table, base: str) -> None:
    """Write a folder that is there and empty. `trained`: the adapter's weights; `base`: where the model's own lie."""
    adapter = model.adapter
    assert adapter is not None
    modules: list[str] = []
    tensors: dict[str, np.ndarray] = {}
    for place in map_params(table, model.base):
        for name, a, b in _additions(trained, place):
            modules.append(name.removesuffix(".weight"))
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
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def _additions(trained: Tree, place: Place) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Name, a and b of what the adapter adds to each tensor of a place; nothing where it adds nothing."""
    nodes = [_below(trained, (*keys[:-1], ADAPTER)) for keys in place.keys]
    if not any(nodes):
        return
    if len(nodes) > 1 or place.row.neighbours or place.row.leading or not place.row.turned:
        reason = f"adds to {place.keys[0][-2]}, which lies with others in {place.row.hf}: PEFT has no words for that"
        raise ConfigError(Problem("task.format", reason, value="peft", hint="task.format=hf writes it merged"))
    a, b = np.asarray(nodes[0]["a"]), np.asarray(nodes[0]["b"])
    yield from ((place.name(tensor), a[tensor.index], b[tensor.index]) for tensor in place.tensors)


def _below(tree: Tree, keys: tuple[str, ...]) -> Tree:
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
