"""Read and write LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.quantization import Adapter, AdapterKind
from maxhydra.convert.name_table import Table
from maxhydra.convert.param_map import Keys, ParamMapping, map_params
from maxhydra.model import ModelDef
from maxhydra.model.lora import ADAPTER
from maxhydra.record.atomic_io import read_json

Tree = Any
# PEFT's prefix of the wrapped model's tensor names.
PREFIX = "base_model.model."
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# PEFT settings that change what an adapter computes, with the values for which it is plain LoRA.
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    # Other methods, such as pissa and olora, change the base weights.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    # Activated LoRA leaves the tokens before these unchanged.
    "alora_invocation_tokens": ([], None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "arrow_config": (None,),
    "layer_replication": ([], None),
}


def is_peft_folder(path: Path) -> bool:
    return (path / SETTINGS).is_file()


@dataclasses.dataclass(frozen=True)
class PeftFolder:
    """A PEFT adapter read into memory. `key` is the config field that names its location, for errors."""

    key: str
    location: str
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def base(self) -> str:
        """Location of the base weights it was trained on."""
        return str(self.settings.get("base_model_name_or_path") or "")

    def adapter(self, model: ModelDef, table: Table) -> Adapter:
        """The adapter as our config section; its targets are the projections that have LoRA tensors."""
        names = [
            name
            for mapping in map_params(table, model)
            if self._lora_names(mapping)
            for name in _projections(mapping, model)
        ]
        targets = [f"^{re.escape(name)}$" for name in dict.fromkeys(names)]
        return Adapter(
            kind=AdapterKind.lora,
            rank=self.settings["r"],
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout") or 0.0),
            targets=targets,
        )

    def trained(self, model: ModelDef, table: Table) -> Tree:
        """The adapter as the tree of trainable parameters; ConfigError if the model lacks one of its modules."""
        tree: Tree = {}
        used: set[str] = set()
        for mapping in map_params(table, model):
            lora_names = self._lora_names(mapping)
            if lora_names and len(mapping.keys) == 1:
                used |= {name for pair in lora_names.values() for name in pair}
                self._put(tree, mapping, lora_names)
        if extra := sorted(set(self.tensors) - used):
            raise self.problem(f"contains {extra[0]}, which the model has no parameter for")
        return tree

    def problem(self, reason: str) -> ConfigError:
        return ConfigError(Problem(self.key, reason, value=self.location))

    def _lora_names(self, mapping: ParamMapping) -> dict[tuple[int, ...], tuple[str, str]]:
        """Index in the mapping's parameters -> names of lora_A and lora_B, for the tensors that have them."""
        lora_names = {}
        for tensor in mapping.tensors:
            stem = PREFIX + mapping.tensor_name(tensor).removesuffix(".weight")
            names = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
            if all(name in self.tensors for name in names):
                lora_names[tensor.index] = names
        return lora_names

    def _put(self, tree: Tree, mapping: ParamMapping, lora_names: dict[tuple[int, ...], tuple[str, str]]) -> None:
        """Insert A and B of a mapping; layers without an adapter get zeros, which add nothing."""
        (shape,), inputs, rank = mapping.layout.shapes, mapping.row.inputs, self.settings["r"]
        a = np.zeros((*mapping.stack_shape, *shape[:inputs], rank), np.float32)
        b = np.zeros((*mapping.stack_shape, rank, *shape[inputs:]), np.float32)
        for index, (name_a, name_b) in lora_names.items():
            for array, name in ((a, name_a), (b, name_b)):
                stored = self.tensors[name].T
                if stored.size != array[index].size:
                    raise self.problem(f"{name} has shape {list(stored.T.shape)}, which does not fit the model")
                array[index] = stored.reshape(array[index].shape)
        node = tree
        for key in (*mapping.keys[0][:-1], ADAPTER):
            node = node.setdefault(key, {})
        node |= {"a": a, "b": b}


def open_peft(key: str, location: str, folder: Path) -> PeftFolder:
    """Read an adapter; ConfigError if it cannot be read or is not plain LoRA."""
    try:
        settings = read_json(folder / SETTINGS)
        tensors = load_file(folder / TENSORS)
        if not isinstance(settings, dict):
            raise ValueError(f"{SETTINGS} is not a JSON object")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(Problem(key, f"cannot be read as a PEFT adapter: {error}", value=location)) from None
    unsupported = {name: settings.get(name) for name, plain in PLAIN_LORA.items() if settings.get(name) not in plain}
    if (
        unsupported
        or not isinstance(settings.get("r"), int)
        or not isinstance(settings.get("lora_alpha"), (int, float))
    ):
        what = ", ".join(f"{name}={value}" for name, value in unsupported.items()) or "no rank r or no lora_alpha"
        raise ConfigError(Problem(key, f"is a PEFT adapter with {what}", value=location, accepted="plain LoRA"))
    return PeftFolder(key, location, settings, {name: array.astype(np.float32) for name, array in tensors.items()})


def _projections(mapping: ParamMapping, model: ModelDef) -> list[str]:
    """Names of a mapping's projections as adapter.targets uses them: <layer kind>/<path>."""
    kinds = model.config.prefix if mapping.keys[0][0] == "prefix" else model.config.pattern
    return [_projection_name(keys, kinds) for keys in mapping.keys]


def _projection_name(keys: Keys, kinds: list[str]) -> str:
    return "/".join((kinds[int(keys[1])], *keys[2:-1])) if keys[1:2] and keys[1].isdigit() else "/".join(keys[:-1])


def write_peft(folder: Path, model: ModelDef, trained: Tree, *, table: Table, base: str) -> None:
    """Write an adapter into an existing empty folder. `trained`: its weights; `base`: location of the base weights."""
    adapter = model.adapter
    assert adapter is not None
    modules: list[str] = []
    tensors: dict[str, np.ndarray] = {}
    for mapping in map_params(table, model.base):
        for name, a, b in _lora_weights(trained, mapping):
            modules.append(name.removesuffix(".weight"))
            rank = a.shape[-1]
            tensors[f"{PREFIX}{modules[-1]}.lora_A.weight"] = np.ascontiguousarray(a.reshape(-1, rank).T)
            tensors[f"{PREFIX}{modules[-1]}.lora_B.weight"] = np.ascontiguousarray(b.reshape(rank, -1).T)
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


def _lora_weights(trained: Tree, mapping: ParamMapping) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield tensor name, A and B for each tensor of a mapping that has an adapter."""
    nodes = [_lookup(trained, (*keys[:-1], ADAPTER)) for keys in mapping.keys]
    if not any(nodes):
        return
    row = mapping.row
    if len(nodes) > 1 or row.interleaved_rope or row.leading or not row.transposed:
        reason = f"cannot represent the adapter of {mapping.keys[0][-2]}: in this family it is part of {row.hf}"
        hint = "use task.format=hf, which writes the merged weights"
        raise ConfigError(Problem("task.format", reason, value="peft", hint=hint))
    a, b = np.asarray(nodes[0]["a"]), np.asarray(nodes[0]["b"])
    yield from ((mapping.tensor_name(tensor), a[tensor.index], b[tensor.index]) for tensor in mapping.tensors)


def _lookup(tree: Tree, keys: tuple[str, ...]) -> Tree:
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
