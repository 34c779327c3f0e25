"""Write a Hugging Face folder: config.json and safetensors, with one tensor in memory at a time."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.compatibility import is_same
from maxhydra.convert.hf import INDEX, SINGLE
from maxhydra.convert.hf_config import build_model, to_hf_settings, to_values
from maxhydra.convert.name_table import Table, Weight, all_tables
from maxhydra.convert.param_map import ParamMapping, TensorIndex, map_params, unmapped_params
from maxhydra.convert.streaming import Arrays
from maxhydra.model import ModelDef

SAFETENSORS_DTYPES = {
    **{"float32": "F32", "bfloat16": "BF16", "float16": "F16"},
    **{"int8": "I8", "int64": "I64", "float8_e4m3fn": "F8_E4M3"},
}
# Maximum bytes per file; transformers splits at the same size.
MAX_SHARD_BYTES = 5 * 10**9


def find_family(model: ModelDef, model_type: str | None, *, has_gguf: bool = False) -> Table:
    """The first table that can represent the model, or the one of `model_type`; ConfigError if there is none.

    `has_gguf`: only tables with a GGUF architecture.
    """
    tables = {table.model_type: table for table in all_tables() if table.gguf is not None or not has_gguf}
    fitting = [table for name, table in tables.items() if model_type in (None, name) and _can_represent(table, model)]
    if not fitting:
        reason = f"no supported {'GGUF' if has_gguf else 'Hugging Face'} model_type can represent this model"
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


class StoredTensor(NamedTuple):
    """A tensor of a file, which is read when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        """Bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


# Replaces a tensor by those in which it is stored; the row describes it.
Compression = Callable[[Weight, StoredTensor], list[StoredTensor]]


def write_hf(
    folder: Path,
    model: ModelDef,
    arrays: Arrays,
    *,
    table: Table,
    dtype: np.dtype,
    extra: Mapping[str, Any],
    compress: Compression = lambda row, tensor: [tensor],
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
    tensors = [
        stored
        for mapping in map_params(table, model)
        for tensor in mapping.tensors
        for stored in compress(mapping.row, _tensor(arrays, mapping, tensor, dtype))
    ]
    shards = np.unique((np.cumsum([each.size for each in tensors]) - 1) // MAX_SHARD_BYTES, return_inverse=True)[1]
    count = int(shards[-1]) + 1
    files = [SINGLE if count == 1 else f"model-{n + 1:05}-of-{count:05}.safetensors" for n in range(count)]
    for number, file in enumerate(files):
        write_safetensors(folder / file, [each for each, shard in zip(tensors, shards, strict=True) if shard == number])
    if count > 1:
        weight_map = {each.name: files[int(shard)] for each, shard in zip(tensors, shards, strict=True)}
        index = {"metadata": {"total_size": sum(each.size for each in tensors)}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2), encoding="utf-8")


def write_safetensors(path: Path, tensors: Sequence[StoredTensor]) -> None:
    """Write a safetensors file, with one tensor in memory at a time."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape, dtype, _ in tensors:
        end = offset + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": SAFETENSORS_DTYPES[dtype.name], "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        for tensor in tensors:
            array = tensor.read()
            assert array.shape == tensor.shape and array.dtype == tensor.dtype
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)


def _tensor(arrays: Arrays, mapping: ParamMapping, tensor: TensorIndex, dtype: np.dtype) -> StoredTensor:
    dtype = np.dtype(mapping.row.dtype) if mapping.row.dtype else dtype

    def read() -> np.ndarray:
        params = [arrays.read_slice(keys, tensor.index).astype(dtype) for keys in mapping.keys]
        return mapping.layout.to_hf(params, interleaved_rope=mapping.row.interleaved_rope)

    return StoredTensor(mapping.tensor_name(tensor), mapping.layout.hf_shape, dtype, read)
