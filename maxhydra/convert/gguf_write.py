"""Write a GGUF file, the format of llama.cpp, with the `gguf` package; one tensor is in memory at a time."""

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema import model as config
from maxhydra.config.schema.tasks.inference import ConvertFormat
from maxhydra.convert.gguf import FREQUENCY_FACTORS
from maxhydra.convert.hf_config import to_hf_settings
from maxhydra.convert.name_table import Table
from maxhydra.convert.param_map import map_params
from maxhydra.convert.streaming import Arrays
from maxhydra.layers.rope import frequencies
from maxhydra.model import ModelDef

# Format -> tensor type of matrices, and the file type that llama.cpp shows.
TYPES = {
    ConvertFormat.gguf_f16: ("F16", "MOSTLY_F16"),
    ConvertFormat.gguf_q8_0: ("Q8_0", "MOSTLY_Q8_0"),
    ConvertFormat.gguf_q4_0: ("Q4_0", "MOSTLY_Q4_0"),
}
FLOATS = ("rms_norm_eps", "rope_theta")
FILE = "model.gguf"
KEY = "task.format"
UNSUPPORTED = "is not supported by a GGUF file"


def check_representable(model: ModelDef, table: Table) -> None:
    """Raise ConfigError for settings that a GGUF file of the family lacks and llama.cpp would ignore."""
    problems = []
    for name, kind in model.config.kinds.items():
        attention = kind.attention
        if attention.window is not None:
            problems.append(Problem(f"model.kinds.{name}.attention.window", UNSUPPORTED, value=attention.window))
        if attention.rope.kind not in (config.RopeKind.default, config.RopeKind.llama3):
            problems.append(Problem(f"model.kinds.{name}.attention.rope.kind", UNSUPPORTED, value=attention.rope.kind))
        if kind.mlp.activation is not config.Activation.silu:
            problems.append(Problem(f"model.kinds.{name}.mlp.activation", UNSUPPORTED, value=kind.mlp.activation))
    unnamed = [mapping.row.paths[0] for mapping in map_params(table, model) if not mapping.row.gguf]
    if unnamed:
        problems.append(Problem(KEY, f"has no tensor for {unnamed[0]} of model_type {table.model_type}"))
    if problems:
        raise ConfigError(problems)


def write_gguf(
    folder: Path,
    model: ModelDef,
    arrays: Arrays,
    *,
    table: Table,
    format: ConvertFormat,
    tokenizer: Mapping[str, Any],
) -> None:
    """Write model.gguf; `tokenizer`: metadata of the tokenizer, without the prefix `tokenizer.`."""
    assert table.gguf is not None
    gguf, quants = _library()
    matrix_type, file_type = TYPES[format]
    kind = gguf.GGMLQuantizationType[matrix_type]
    prefix = table.gguf.architectures[0]
    writer = gguf.GGUFWriter(folder / FILE, prefix)
    settings = to_hf_settings(table, model.config) or {}
    for hf_key, name in table.gguf.settings.items():
        add = writer.add_float32 if hf_key in FLOATS else writer.add_uint32
        add(f"{prefix}.{name}", settings[hf_key])
    writer.add_value_length(model.config.head_dim)
    writer.add_rope_dimension_count(model.config.head_dim)
    writer.add_file_type(gguf.LlamaFileType[file_type])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    for name, value in tokenizer.items():
        writer.add_key_value(f"tokenizer.{name}", value, *_value_types(gguf, value))

    rows = [(mapping, tensor) for mapping in map_params(table, model) for tensor in mapping.tensors]
    types = [_tensor_type(gguf, kind, mapping.layout.hf_shape) for mapping, _ in rows]
    for (mapping, tensor), own in zip(rows, types, strict=True):
        _announce(gguf, writer, mapping.tensor_name(tensor, is_gguf=True), mapping.layout.hf_shape, own)
    if (factors := _frequency_factors(model.config)) is not None:
        _announce(gguf, writer, FREQUENCY_FACTORS, factors.shape, gguf.GGMLQuantizationType.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for (mapping, tensor), own in zip(rows, types, strict=True):
        params = [arrays.read_slice(keys, tensor.index).astype(np.float32) for keys in mapping.keys]
        stored = mapping.layout.to_hf(params, interleaved_rope=mapping.row.gguf_interleaved_rope)
        writer.write_tensor_data(quants.quantize(stored, own))
    if factors is not None:
        writer.write_tensor_data(factors)
    writer.close()


def _library() -> tuple[Any, Any]:
    try:
        return importlib.import_module("gguf"), importlib.import_module("gguf.quants")
    except ModuleNotFoundError:
        reason = "needs the package gguf, which is not installed"
        raise ConfigError(Problem(KEY, reason, value="gguf", hint="pip install 'maxhydra[gguf]'")) from None


def _tensor_type(gguf: Any, kind: Any, shape: tuple[int, ...]) -> Any:
    """Vectors are float32; a matrix whose rows are not whole blocks is float16, as llama.cpp writes it."""
    if len(shape) < 2:
        return gguf.GGMLQuantizationType.F32
    block = gguf.GGML_QUANT_SIZES[kind][0]
    return kind if shape[-1] % block == 0 else gguf.GGMLQuantizationType.F16


def _announce(gguf: Any, writer: Any, name: str, shape: tuple[int, ...], kind: Any) -> None:
    floats = {gguf.GGMLQuantizationType.F32: np.float32, gguf.GGMLQuantizationType.F16: np.float16}
    if kind in floats:
        dtype = np.dtype(floats[kind])
        writer.add_tensor_info(name, shape, dtype, int(np.prod(shape)) * dtype.itemsize)
        return
    stored = gguf.quant_shape_to_byte_shape(shape, kind)
    writer.add_tensor_info(name, stored, np.dtype(np.uint8), int(np.prod(stored)), raw_dtype=kind)


def _value_types(gguf: Any, value: Any) -> tuple[Any, ...]:
    types = gguf.GGUFValueType
    if isinstance(value, list):
        return types.ARRAY, types.STRING if value and isinstance(value[0], str) else types.INT32
    return (types.STRING,) if isinstance(value, str) else (types.UINT32,)


def _frequency_factors(model: config.Model) -> np.ndarray | None:
    """Divisors of the unscaled RoPE frequencies; None without scaling."""
    rope = model.kinds[model.pattern[0]].attention.rope
    if rope.kind is not config.RopeKind.llama3:
        return None
    plain: dict[str, Any] = {"theta": rope.theta}
    unscaled, scaled = frequencies(config.Rope(**plain), model.head_dim), frequencies(rope, model.head_dim)
    return (np.asarray(unscaled) / np.asarray(scaled)).astype(np.float32)
