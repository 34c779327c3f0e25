"""Our weights as a Hugging Face folder: config.json and safetensors. What hf.py reads, the other way round."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from maxhydra.config import ConfigError, Problem
from maxhydra.config import model as config
from maxhydra.convert.facts import stated
from maxhydra.convert.fill import Place, places
from maxhydra.convert.hf import INDEX, SINGLE, STRETCHED
from maxhydra.convert.table import Table, all_tables
from maxhydra.model import ModelDef

Tree = Any
# Bytes of a file at most; Hugging Face cuts at this size too.
SHARD = 5 * 10**9


def family_of(model: ModelDef, wanted: str | None) -> tuple[Table, str]:
    """The table and the model_type that can tell this model, or the one that is wanted."""
    known = [(table, name) for table in all_tables() for name in table.hf_classes]
    fitting = [(table, name) for table, name in known if not (wanted and name != wanted) and _fits(model, table, name)]
    if not fitting:
        reason = "no model_type of Hugging Face that we know tells this model"
        accepted = ", ".join(name for _, name in known)
        raise ConfigError(Problem("task.model_type", reason, value=wanted, accepted=accepted))
    return fitting[0]


def write_hf(
    folder: Path, model: ModelDef, params: Tree, *, family: tuple[Table, str], dtype: np.dtype, extra: Mapping[str, Any]
) -> None:
    """Write a folder that is there and empty; `extra` are further keys of config.json. One file's tensors are in memory
    at a time."""
    table, model_type = family
    settings = {**_settings(model.config, table, model_type), "dtype": dtype.name, "torch_dtype": dtype.name, **extra}
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    rows = [(name, place, at) for place in places(table, model) or () for name, at in _names(place)]
    sizes = [int(np.prod(place.shape)) * dtype.itemsize for _, place, _ in rows]
    numbers = np.unique((np.cumsum(sizes) - 1) // SHARD, return_inverse=True)[1]
    count = int(numbers[-1]) + 1
    files = [SINGLE if count == 1 else f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(files):
        own = [row for row, which in zip(rows, numbers, strict=True) if which == number]
        tensors = {name: place.turned_back(_host(params, place, at).astype(dtype)) for name, place, at in own}
        save_file(tensors, folder / file, metadata={"format": "pt"})
    if count > 1:
        where = {name: files[int(number)] for (name, _, _), number in zip(rows, numbers, strict=True)}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _fits(model: ModelDef, table: Table, model_type: str) -> bool:
    facts = stated(model.config)
    blind = table.hf_blind.get(model_type, ())
    return places(table, model) is not None and facts is not None and all(facts[name] is None for name in blind)


def _settings(model: config.Model, table: Table, model_type: str) -> dict[str, Any]:
    facts = stated(model)
    assert facts is not None
    blind = table.hf_blind.get(model_type, ())
    rope = next(iter(model.kinds.values())).attention.rope
    scaling = None
    if rope.kind is config.RopeKind.llama3:
        scaling = {"rope_type": "llama3"} | {theirs: getattr(rope, ours) for ours, theirs in STRETCHED.items()}
    return {
        "architectures": [table.hf_classes[model_type]],
        "model_type": model_type,
        **{theirs: facts[ours] for ours, theirs in table.hf_facts.items() if ours not in blind},
        "tie_word_embeddings": model.head is config.Head.tied,
        "max_position_embeddings": model.context_length,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


def _names(place: Place) -> Iterator[tuple[str, int | None]]:
    """The tensors of an array: their names, and where each lies in it."""
    for at, layer in enumerate(place.layers):
        yield place.weight.hf.format(layer=layer), at if place.is_stacked else None


def _host(params: Tree, place: Place, at: int | None) -> np.ndarray:
    array = params
    for key in place.keys:
        array = array[key]
    return np.asarray(jax.device_get(array if at is None else array[at]))
