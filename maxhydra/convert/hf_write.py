"""Write a Hugging Face folder: config.json and safetensors, with one tensor in memory at a time."""

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf import INDEX, SINGLE
from maxhydra.convert.hf_config import build_model, to_hf_settings, to_values
from maxhydra.convert.name_table import Table, all_tables
from maxhydra.convert.param_map import ParamMapping, TensorIndex, map_params, unmapped_params
from maxhydra.convert.streaming import Arrays
from maxhydra.model import ModelDef

SAFETENSORS_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Maximum bytes per file; transformers splits at the same size.
MAX_SHARD_BYTES = 5 * 10**9


def find_family(model: ModelDef, model_type: str | None) -> Table:
    """The first table that can represent the model, or the one of `model_type`; ConfigError if there is none."""
    tables = {table.model_type: table for table in all_tables()}
    fitting = [table for name, table in tables.items() if model_type in (None, name) and _can_represent(table, model)]
    if not fitting:
        reason = "no supported Hugging Face model_type can represent this model"
        if model_type is not None:
            reason = "cannot represent this model"
        raise ConfigError(Problem("task.model_type", reason, value=model_type, accepted=", ".join(tables)))
    return fitting[0]


def _can_represent(table: Table, model: ModelDef) -> bool:
    """True if the family has a tensor for every parameter and its config.json round-trips to the same model."""
    if unmapped_params(table, model):
        return False
    try:
        settings = to_hf_settings(table, model.config)
        round_trip = None if settings is None else build_model("", table.model_type, to_values(table, settings))
    except (ConfigError, ValueError):
        return False
    return round_trip is not None and is_same(round_trip, model.config)


def write_hf(
    folder: Path, model: ModelDef, arrays: Arrays, *, table: Table, dtype: np.dtype, extra: Mapping[str, Any]
) -> None:
    """Write the model into an existing empty folder; `extra` are additional keys of config.json."""
    settings = {
        "model_type": table.model_type,
        **(to_hf_settings(table, model.config) or {}),
        "dtype": dtype.name,
        "torch_dtype": dtype.name,
        **extra,
    }
    (folder / "config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")
    rows = [(mapping, tensor) for mapping in map_params(table, model) for tensor in mapping.tensors]
    sizes = [math.prod(mapping.layout.hf_shape) * dtype.itemsize for mapping, _ in rows]
    shards = np.unique((np.cumsum(sizes) - 1) // MAX_SHARD_BYTES, return_inverse=True)[1]
    count = int(shards[-1]) + 1
    files = [SINGLE if count == 1 else f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(files):
        shard_rows = [row for row, shard in zip(rows, shards, strict=True) if shard == number]
        shapes = {mapping.tensor_name(tensor): mapping.layout.hf_shape for mapping, tensor in shard_rows}
        tensors = (_read_tensor(arrays, mapping, tensor, dtype) for mapping, tensor in shard_rows)
        write_safetensors(folder / file, shapes, tensors, dtype=dtype)
    if count > 1:
        weight_map = {
            mapping.tensor_name(tensor): files[int(shard)]
            for (mapping, tensor), shard in zip(rows, shards, strict=True)
        }
        index = {"metadata": {"total_size": sum(sizes)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_safetensors(
    path: Path, shapes: Mapping[str, tuple[int, ...]], tensors: Iterable[np.ndarray], *, dtype: np.dtype
) -> None:
    """Write a safetensors file; `tensors` is consumed lazily, in the order of `shapes`."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for shape, tensor in zip(shapes.values(), tensors, strict=True):
            assert tensor.shape == shape and tensor.dtype == dtype
            file.write(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)


def _read_tensor(arrays: Arrays, mapping: ParamMapping, tensor: TensorIndex, dtype: np.dtype) -> np.ndarray:
    return mapping.layout.to_hf([arrays.read_slice(keys, tensor.index).astype(dtype) for keys in mapping.keys])
