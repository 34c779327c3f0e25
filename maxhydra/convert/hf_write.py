"""Our weights as a Hugging Face folder: config.json and safetensors. What hf.py reads, the other way round."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.arrays import Arrays
from maxhydra.convert.derive import model_of
from maxhydra.convert.hf import INDEX, SINGLE
from maxhydra.convert.meaning import is_same
from maxhydra.convert.places import Place, Tensor, places, unplaced
from maxhydra.convert.safetensors_write import write_safetensors
from maxhydra.convert.table import Table, all_tables
from maxhydra.model import ModelDef

# Bytes of a file at most; Hugging Face cuts at this size too.
SHARD = 5 * 10**9


def family_of(model: ModelDef, wanted: str | None) -> Table:
    """The first table that can tell this model, or the one that is wanted."""
    known = {table.written_type: table for table in all_tables()}
    fitting = [table for name, table in known.items() if wanted in (None, name) and _fits(model, table)]
    if not fitting:
        reason = "no model_type of Hugging Face that we know tells this model"
        raise ConfigError(Problem("task.model_type", reason, value=wanted, accepted=", ".join(known)))
    return fitting[0]


def write_hf(
    folder: Path, model: ModelDef, arrays: Arrays, *, table: Table, dtype: np.dtype, extra: Mapping[str, Any]
) -> None:
    """Write a folder that is there and empty; `extra` are further keys of config.json. One tensor is in memory at a
    time."""
    settings = {
        "architectures": [table.hf_types[table.written_type]],
        "model_type": table.written_type,
        **(table.to_settings(model.config) or {}),
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    rows = [(place, tensor) for place in places(table, model) for tensor in place.tensors]
    sizes = [math.prod(place.layout.their_shape) * dtype.itemsize for place, _ in rows]
    numbers = np.unique((np.cumsum(sizes) - 1) // SHARD, return_inverse=True)[1]
    count = int(numbers[-1]) + 1
    files = [SINGLE if count == 1 else f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(files):
        own = [row for row, which in zip(rows, numbers, strict=True) if which == number]
        shapes = {place.name(tensor): place.layout.their_shape for place, tensor in own}
        write_safetensors(folder / file, shapes, (_theirs(arrays, *row, dtype) for row in own), dtype=dtype)
    if count > 1:
        where = {place.name(tensor): files[int(n)] for (place, tensor), n in zip(rows, numbers, strict=True)}
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def _fits(model: ModelDef, table: Table) -> bool:
    """Whether a family has a name for every weight, and words for what they mean."""
    if unplaced(table, model):
        return False
    try:
        settings = table.to_settings(model.config)
        back = None if settings is None else model_of("", table.written_type, table.to_model(settings))
    except (ConfigError, ValueError):
        return False
    return back is not None and is_same(back, model.config)


def _theirs(arrays: Arrays, place: Place, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    return place.layout.theirs([arrays.part(keys, tensor.index).astype(dtype) for keys in place.keys])
