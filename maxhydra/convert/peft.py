"""An adapter that PEFT wrote, as one of ours. What peft_write.py writes, the other way round."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.adapter import Adapter, AdapterKind
from maxhydra.convert.name_table import Table
from maxhydra.convert.param_map import Keys, Place, map_params
from maxhydra.convert.peft_write import SETTINGS, TENSORS, WRAPPED
from maxhydra.model import ModelDef
from maxhydra.model.param_partition import ADAPTER

Tree = Any
# Settings of PEFT that change what an adapter does, with the values under which it does what ours do.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_rslora": (False, None),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    # Others, such as pissa and olora, take a part out of the weights around it.
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
    # Adds nothing before these tokens.
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
    """Where an adapter was found, and what it says. `key` is the config field that names it."""

    key: str
    location: str
    settings: dict[str, Any]
    tensors: dict[str, np.ndarray]

    @property
    def base(self) -> str:
        """Where the weights lie that it was trained around."""
        return str(self.settings.get("base_model_name_or_path") or "")

    def adapter(self, model: ModelDef, table: Table) -> Adapter:
        """As our config has it: additions to the projections for which it has tensors."""
        names = [
            name for place in map_params(table, model) if self._parts(place) for name in _projections(place, model)
        ]
        chosen = [f"^{re.escape(name)}$" for name in dict.fromkeys(names)]
        return Adapter(
            kind=AdapterKind.lora,
            rank=self.settings["r"],
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout") or 0.0),
            targets=chosen,
        )

    def trained(self, model: ModelDef, table: Table) -> Tree:
        """Its weights as the tree of what a run of ours trains; ConfigError where one has no place."""
        tree: Tree = {}
        used: set[str] = set()
        for place in map_params(table, model):
            parts = self._parts(place)
            if parts and len(place.keys) == 1:
                used |= {name for pair in parts.values() for name in pair}
                self._put(tree, place, parts)
        if extra := sorted(set(self.tensors) - used):
            raise self.problem(f"holds {extra[0]}, for which the model has no place")
        return tree

    def problem(self, reason: str) -> ConfigError:
        return ConfigError(Problem(self.key, reason, value=self.location))

    def _parts(self, place: Place) -> dict[tuple[int, ...], tuple[str, str]]:
        """Index of a tensor in the place's arrays -> the names of its a and b, where it has them."""
        found = {}
        for tensor in place.tensors:
            stem = WRAPPED + place.name(tensor).removesuffix(".weight")
            names = f"{stem}.lora_A.weight", f"{stem}.lora_B.weight"
            if all(name in self.tensors for name in names):
                found[tensor.index] = names
        return found

    def _put(self, tree: Tree, place: Place, parts: dict[tuple[int, ...], tuple[str, str]]) -> None:
        """Layers that it leaves alone get zeros, which add nothing."""
        (shape,), inputs, rank = place.layout.shapes, place.row.inputs, self.settings["r"]
        a = np.zeros((*place.counted, *shape[:inputs], rank), np.float32)
        b = np.zeros((*place.counted, rank, *shape[inputs:]), np.float32)
        for index, (name_a, name_b) in parts.items():
            for array, name in ((a, name_a), (b, name_b)):
                theirs = self.tensors[name].T
                if theirs.size != array[index].size:
                    raise self.problem(f"{name} is {list(theirs.T.shape)}, which does not fit the model")
                array[index] = theirs.reshape(array[index].shape)
        node = tree
        for key in (*place.keys[0][:-1], ADAPTER):
            node = node.setdefault(key, {})
        node |= {"a": a, "b": b}


def open_peft(key: str, location: str, folder: Path) -> PeftFolder:
    """ConfigError where it cannot be read, or does what no adapter of ours does."""
    try:
        settings = json.loads((folder / SETTINGS).read_text(encoding="utf-8"))
        tensors = load_file(folder / TENSORS)
        if not isinstance(settings, dict):
            raise ValueError(f"{SETTINGS} holds no settings")
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(Problem(key, f"cannot be read as an adapter of PEFT: {error}", value=location)) from None
    odd = {name: settings.get(name) for name, plain in PLAIN.items() if settings.get(name) not in plain}
    if odd or not isinstance(settings.get("r"), int) or not isinstance(settings.get("lora_alpha"), (int, float)):
        told = ", ".join(f"{name}={value}" for name, value in odd.items()) or "no rank r or no lora_alpha"
        raise ConfigError(Problem(key, f"is an adapter with {told}", value=location, accepted="a plain LoRA"))
    return PeftFolder(key, location, settings, {name: array.astype(np.float32) for name, array in tensors.items()})


def _projections(place: Place, model: ModelDef) -> list[str]:
    """Names of the projections of a place, <layer kind>/<path>, as adapter.targets has them."""
    kinds = model.config.prefix if place.keys[0][0] == "prefix" else model.config.pattern
    return [_name(keys, kinds) for keys in place.keys]


def _name(keys: Keys, kinds: list[str]) -> str:
    return "/".join((kinds[int(keys[1])], *keys[2:-1])) if keys[1:2] and keys[1].isdigit() else "/".join(keys[:-1])
