"""Write a Hugging Face folder: config.json and safetensors, one tensor in memory at a time."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.arrays import Arrays
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf import INDEX, SINGLE
from maxhydra.convert.hf_config import model_of
from maxhydra.convert.name_table import Table, all_tables
from maxhydra.convert.param_map import Place, Tensor, map_params, unmapped_params
from maxhydra.model import ModelDef

TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray], *, dtype: np.dtype
) -> None:
    """`tensors` come in the order of `shapes`, and are asked for one at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    place = 0
    for name, shape in shapes.items():
        size = math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": TYPES[dtype.name], "shape": list(shape), "data_offsets": [place, place + size]}
        place += size
    told = json.dumps(header).encode()
    told += b" " * (-len(told) % 8)
    with path.open("wb") as file:
        file.write(len(told).to_bytes(8, "little") + told)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.shape == shape and tensor.dtype == dtype
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


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
    rows = [(place, tensor) for place in map_params(table, model) for tensor in place.tensors]
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
    if unmapped_params(table, model):
        return False
    try:
        settings = table.to_settings(model.config)
        back = None if settings is None else model_of("", table.written_type, table.to_model(settings))
    except (ConfigError, ValueError):
        return False
    return back is not None and is_same(back, model.config)


def _theirs(arrays: Arrays, place: Place, tensor: Tensor, dtype: np.dtype) -> np.ndarray:
    return place.layout.theirs([arrays.part(keys, tensor.index).astype(dtype) for keys in place.keys])
