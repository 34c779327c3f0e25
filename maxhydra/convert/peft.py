"""Read and write LoRA adapters in PEFT's format: adapter_config.json and adapter_model.safetensors."""

import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.model import Head
from maxhydra.config.schema.quantization import Adapter, AdapterInit, AdapterKind
from maxhydra.convert.name_table import Table
from maxhydra.convert.param_map import Keys, ParamMapping, map_params
from maxhydra.convert.peft_experts import (
    PATTERNS,
    ExpertStack,
    expert_stacks,
    fused_patterns,
    has_fused_patterns,
    is_expert_kernel,
)
from maxhydra.model import ModelDef
from maxhydra.model.lora import ADAPTER
from maxhydra.record.atomic_io import read_json

Tree = Any
Tensors = dict[str, np.ndarray]
# PEFT's prefix of the wrapped model's tensor names.
PREFIX = "base_model.model."
# Our names of an adapter's arrays, and PEFT's.
SUFFIXES = {"a": ".lora_A.weight", "b": ".lora_B.weight", "magnitude": ".lora_magnitude_vector"}
# Of an embedding, whose matrices PEFT stores transposed like those of projections.
EMBEDDING_SUFFIXES = {"a": ".lora_embedding_A", "b": ".lora_embedding_B"}
EMBEDDING, HEAD = "embedding", "head"
SETTINGS, TENSORS = "adapter_config.json", "adapter_model.safetensors"
# PEFT settings that change what an adapter computes, with the values for which it is plain LoRA.
PLAIN_LORA: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
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
        targets: dict[str, None] = {}
        parameters: dict[str, None] = {}
        stacks = self._stacked_experts(model, table)
        for mapping in map_params(table, model):
            is_parameter = _is_parameter(mapping)
            for keys in mapping.keys:
                is_stacked = is_expert_kernel(mapping) and keys[-2] in stacks.get(keys[:-2], {})
                if is_stacked or self._lora_names(mapping):
                    (parameters if is_parameter else targets)[_projection_name(keys, _kinds(mapping, model))] = None
        if parameters and self.settings.get("use_dora"):
            raise self.problem(f"has DoRA of {next(iter(parameters))}; DoRA is supported for linear projections")
        return Adapter(
            kind=AdapterKind.lora,
            rank=self.settings["r"],
            alpha=float(self.settings["lora_alpha"]),
            dropout=float(self.settings.get("lora_dropout") or 0.0),
            targets=[f"^{re.escape(name)}$" for name in targets],
            parameters=[f"^{re.escape(name)}$" for name in parameters],
            rank_stabilized=bool(self.settings.get("use_rslora")),
            dora=bool(self.settings.get("use_dora")),
            b_rate_ratio=1.0,
        )

    def trained(self, model: ModelDef, table: Table) -> Tree:
        """The adapter as the tree of trainable parameters; ConfigError if the model lacks one of its modules."""
        tree: Tree = {}
        used: set[str] = set()
        for mapping in map_params(table, model):
            lora_names = self._lora_names(mapping)
            if lora_names and len(mapping.keys) == 1:
                used |= {name for names in lora_names.values() for name in names}
                self._put(tree, mapping, lora_names)
        for stack in expert_stacks(table, model, prefix=PREFIX):
            experts, names = stack.read(self.tensors, self.settings["r"], self.problem)
            used |= names
            if experts:
                node = tree
                for key in stack.keys:
                    node = node.setdefault(key, {})
                node |= experts
        if EMBEDDING in tree and model.config.head is Head.tied:
            used |= self._tied_names(table)
        if extra := sorted(set(self.tensors) - used):
            raise self.problem(f"contains {extra[0]}, which the model has no parameter for")
        return tree

    def problem(self, reason: str, *, hint: str = "") -> ConfigError:
        return ConfigError(Problem(self.key, reason, value=self.location, hint=hint))

    def _tied_names(self, table: Table) -> set[str]:
        """The tensors of the head, which repeat those of the embedding; ConfigError if only one of both is adapted."""
        if not self.settings.get("ensure_weight_tying"):
            reason = "adapts the embedding but not the head, which has the same weights (ensure_weight_tying=False)"
            hint = "train it with ensure_weight_tying=True, or untie the weights of its base model"
            raise ConfigError(Problem(self.key, reason, value=self.location, hint=hint))
        stem = _head_stem(table)
        return {name for name in self.tensors if name.removeprefix(stem) in SUFFIXES.values()}

    def _stacked_experts(self, model: ModelDef, table: Table) -> dict[Keys, Tree]:
        """Path of experts -> their adapters, of those that PEFT adapts as parameters of transformers."""
        stacks = expert_stacks(table, model, prefix=PREFIX)
        return {stack.keys: stack.read(self.tensors, self.settings["r"], self.problem)[0] for stack in stacks}

    def _suffixes(self, mapping: ParamMapping) -> dict[str, str]:
        """PEFT's names of the arrays of an adapter."""
        if mapping.keys[0][0] == EMBEDDING:
            return EMBEDDING_SUFFIXES
        return SUFFIXES if self.settings.get("use_dora") else {name: SUFFIXES[name] for name in ("a", "b")}

    def _lora_names(self, mapping: ParamMapping) -> dict[tuple[int, ...], list[str]]:
        """Index in the mapping's parameters -> names of the adapter's tensors, for the parameters that have one."""
        lora_names = {}
        for tensor in mapping.tensors:
            stem = PREFIX + mapping.tensor_name(tensor).removesuffix(".weight")
            names = [stem + suffix for suffix in self._suffixes(mapping).values()]
            if all(name in self.tensors for name in names):
                lora_names[tensor.index] = names
        return lora_names

    def _put(self, tree: Tree, mapping: ParamMapping, lora_names: dict[tuple[int, ...], list[str]]) -> None:
        """Insert the adapter of a mapping; layers without one get zeros, which add nothing."""
        (shape,), inputs, rank = mapping.layout.shapes, mapping.row.inputs, self.settings["r"]
        shapes = {"a": (*shape[:inputs], rank), "b": (rank, *shape[inputs:]), "magnitude": shape[inputs:]}
        arrays = {name: np.zeros((*mapping.stack_shape, *shapes[name]), np.float32) for name in self._suffixes(mapping)}
        if "magnitude" in arrays and len(lora_names) < math.prod(mapping.stack_shape):
            raise self.problem(f"has DoRA in only some layers of {mapping.row.hf}; it must be in all or none")
        for index, names in lora_names.items():
            for array, name in zip(arrays.values(), names, strict=True):
                stored = self.tensors[name].T
                if stored.size != array[index].size:
                    raise self.problem(f"{name} has shape {list(stored.T.shape)}, which does not fit the model")
                array[index] = stored.reshape(array[index].shape)
        node = tree
        for key in (*mapping.keys[0][:-1], ADAPTER):
            node = node.setdefault(key, {})
        node |= arrays


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
    if has_fused_patterns(settings):
        unsupported = {name: value for name, value in unsupported.items() if name not in PATTERNS}
    if (
        unsupported
        or not isinstance(settings.get("r"), int)
        or not isinstance(settings.get("lora_alpha"), (int, float))
    ):
        what = ", ".join(f"{name}={value}" for name, value in unsupported.items()) or "no rank r or no lora_alpha"
        raise ConfigError(Problem(key, f"is a PEFT adapter with {what}", value=location, accepted="plain LoRA"))
    return PeftFolder(key, location, settings, {name: array.astype(np.float32) for name, array in tensors.items()})


def _is_parameter(mapping: ParamMapping) -> bool:
    """Whether a weight is selected by adapter.parameters, not by adapter.targets."""
    return mapping.keys[0][0] in (EMBEDDING, HEAD) or is_expert_kernel(mapping)


def _kinds(mapping: ParamMapping, model: ModelDef) -> list[str]:
    """Layer kinds by the index in a mapping's paths."""
    return model.config.prefix if mapping.keys[0][0] == "prefix" else model.config.pattern


def _head_stem(table: Table) -> str:
    """PEFT's name of the module of the head."""
    (hf,) = (row.hf for row in table.non_layer if row.path == f"{HEAD}/kernel")
    return PREFIX + hf.removesuffix(".weight")


def _projection_name(keys: Keys, kinds: list[str]) -> str:
    return "/".join((kinds[int(keys[1])], *keys[2:-1])) if keys[1:2] and keys[1].isdigit() else "/".join(keys[:-1])


def write_peft(folder: Path, model: ModelDef, trained: Tree, *, table: Table, base: str) -> None:
    """Write an adapter into an existing empty folder. `trained`: its weights; `base`: location of the base weights."""
    adapter = model.adapter
    assert adapter is not None and adapter.rank is not None and adapter.alpha is not None
    # PEFT changes the base weights for PiSSA. To leave them unchanged, [a, start_a] and [b, -start_b] are one adapter
    # of twice the rank and the same scale.
    is_doubled, growth = adapter.init is AdapterInit.pissa, math.sqrt(2) if adapter.rank_stabilized else 2
    settings: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapter.rank * (2 if is_doubled else 1),
        "lora_alpha": adapter.alpha * (growth if is_doubled else 1),
        "use_rslora": adapter.rank_stabilized,
        "use_dora": adapter.dora,
        "lora_dropout": adapter.dropout,
        "target_modules": [],
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors: dict[str, np.ndarray] = {}
    stacks = [stack for stack in expert_stacks(table, model.base, prefix=PREFIX) if stack.adapters(trained)]
    # Experts with a tensor each have an adapter each, unless gate and up share their A, as in an adapter of PEFT.
    if not all(stack.is_by_expert and not stack.shares_a(trained) for stack in stacks):
        _add_stacked(settings, tensors, stacks, trained)
    stacked = {stack.keys for stack in stacks} if tensors else set()
    for mapping in map_params(table, model.base):
        if mapping.keys[0][:-2] not in stacked:
            _add_modules(settings, tensors, trained, mapping)
    if EMBEDDING in trained and model.config.head is Head.tied:
        _add_tied_head(settings, tensors, table)
    (folder / SETTINGS).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    save_file(tensors, folder / TENSORS, metadata={"format": "pt"})


def _add_modules(settings: dict[str, Any], tensors: Tensors, trained: Tree, mapping: ParamMapping) -> None:
    """Add the adapters of a mapping's tensors, each of which is the weight of a module."""
    suffixes = EMBEDDING_SUFFIXES if mapping.keys[0][0] == EMBEDDING else SUFFIXES
    for tensor, arrays in _lora_weights(trained, mapping):
        module, rank = tensor.removesuffix(".weight"), len(arrays["b"])
        matrices: Tensors = {"a": arrays["a"].reshape(-1, rank).T, "b": arrays["b"].reshape(rank, -1).T}
        if "magnitude" in arrays:
            matrices["magnitude"] = arrays["magnitude"].ravel()
        settings["target_modules"].append(module)
        for name, matrix in matrices.items():
            tensors[f"{PREFIX}{module}{suffixes[name]}"] = np.ascontiguousarray(matrix)


def _add_stacked(settings: dict[str, Any], tensors: Tensors, stacks: list[ExpertStack], trained: Tree) -> None:
    """Add the adapters of experts as those of the parameters that hold all experts of a layer."""
    in_blocks = any(stack.differs_in_a(trained) for stack in stacks)
    if in_blocks:
        rank, alpha = settings["r"], settings["lora_alpha"]
        settings |= fused_patterns(rank, alpha, is_rank_stabilized=settings["use_rslora"])
    settings["target_parameters"] = []
    for stack in stacks:
        for parameter, module, *matrices in stack.write(trained, in_blocks=in_blocks):
            settings["target_parameters"].append(parameter.removeprefix(PREFIX))
            for name, matrix in zip(("a", "b"), matrices, strict=True):
                tensors[module + SUFFIXES[name]] = np.ascontiguousarray(matrix)


def _add_tied_head(settings: dict[str, Any], tensors: Tensors, table: Table) -> None:
    """Repeat the adapter of the embedding as that of the head, as PEFT does for weights that stay tied."""
    settings["ensure_weight_tying"] = True
    (stem,) = (name.removesuffix(suffix) for name in tensors if name.endswith(suffix := EMBEDDING_SUFFIXES["a"]))
    head = _head_stem(table)
    for source, target in (("b", "a"), ("a", "b")):
        tensors[head + SUFFIXES[target]] = np.ascontiguousarray(tensors[stem + EMBEDDING_SUFFIXES[source]].T)


def _lora_weights(trained: Tree, mapping: ParamMapping) -> Iterator[tuple[str, dict[str, np.ndarray]]]:
    """Yield tensor name, and a, b and magnitude (DoRA), for each tensor of a mapping that has an adapter."""
    nodes = [_lookup(trained, (*keys[:-1], ADAPTER)) for keys in mapping.keys]
    if not any(nodes):
        return
    row = mapping.row
    is_reordered = row.interleaved_rope or row.axial_rope or row.input_order or row.leading
    if len(nodes) > 1 or is_reordered or not (row.transposed or mapping.keys[0][0] == EMBEDDING):
        reason = f"cannot represent the adapter of {mapping.keys[0][-2]}: in this family it is part of {row.hf}"
        hint = "use task.format=hf, which writes the merged weights"
        raise ConfigError(Problem("task.format", reason, value="peft", hint=hint))
    for tensor in mapping.tensors:
        arrays = {name: np.asarray(stack)[tensor.index] for name, stack in nodes[0].items()}
        if "start_a" in arrays:
            arrays["a"] = np.concatenate([arrays["a"], arrays.pop("start_a")], axis=-1)
            arrays["b"] = np.concatenate([arrays["b"], -arrays.pop("start_b")], axis=0)
        yield mapping.tensor_name(tensor), arrays


def _lookup(tree: Tree, keys: tuple[str, ...]) -> Tree:
    for key in keys:
        tree = tree.get(key, {}) if isinstance(tree, dict) else {}
    return tree
