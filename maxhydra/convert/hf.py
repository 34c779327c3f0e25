"""Read a Hugging Face folder: config.json and safetensors, in one file or in shards with an index.

FP8 and MXFP4 tensors are dequantized. MXFP4 (Open Compute Project, 2023): `x_blocks` [..., O, I / 32, 16] bytes with
two values each, the lower nibble first, and `x_scales` [..., O, I / 32] power-of-two exponents; x is [..., I, O], as in
gpt-oss. FP8 (DeepSeek-V3, 2024): `x` [O, I], and `x_scale_inv` with one factor per tile. compressed-tensors: `x` [O, I]
in FP8 or INT8, and `x_scale` with one factor per output channel.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.hf_config import CONFIG, build_model, find_table, read_settings, to_model_values
from maxhydra.convert.name_table import Settings, UnsupportedError
from maxhydra.convert.source import Source
from maxhydra.record.atomic_io import read_json

Shapes = Mapping[str, tuple[int, ...]]
Read = Callable[[str], np.ndarray]
BLOCKS, SCALES, TILE_SCALES = "_blocks", "_scales", "_scale_inv"
# Values of the sixteen E2M1 codes: sign, two exponent bits, one mantissa bit.
E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
EXPONENT_BIAS = 127
# Name of the FP8 dtype in safetensors.
FLOAT8 = "F8_E4M3"
# Tile shape if quantization_config does not set weight_block_size.
TILE = (128, 128)
METHODS = (None, "fp8", "mxfp4", "compressed-tensors")
# Formats of compressed-tensors: codes, and scales per tensor or output channel in `x_scale`.
COMPRESSED, CHANNEL_SCALES = ("float-quantized", "int-quantized", "naive-quantized"), "_scale"


def dequantized_view(settings: Settings, shapes: Shapes, read: Read) -> tuple[Shapes, Read]:
    """Present quantized tensors as float tensors: their names and shapes, and a reader that dequantizes.

    Raises UnsupportedError for other quantization methods.
    """
    quantization = settings.get("quantization_config") or {}
    if (method := quantization.get("quant_method")) not in METHODS:
        supported = ", ".join(name for name in METHODS if name)
        raise UnsupportedError(f"unsupported quantization_config.quant_method={method} (supported: {supported})")
    if method == "compressed-tensors" and quantization.get("format") not in COMPRESSED:
        supported = ", ".join(COMPRESSED)
        raise UnsupportedError(f"unsupported format={quantization.get('format')} (supported: {supported})")
    tile = tuple(quantization.get("weight_block_size") or TILE)
    float_shapes: dict[str, tuple[int, ...]] = {}
    readers: dict[str, Read] = {}
    for name, shape in shapes.items():
        base = name.removesuffix(BLOCKS)
        if base != name and base + SCALES in shapes:
            *leading, outputs, groups, half = shape
            float_shapes[base] = (*leading, 2 * half * groups, outputs)
            readers[base] = lambda name: _dequantize_mxfp4(read(name + BLOCKS), read(name + SCALES))
        elif name + TILE_SCALES in shapes:
            float_shapes[name] = shape
            readers[name] = lambda name: _dequantize_tiles(read(name), read(name + TILE_SCALES), tile)
        elif name.endswith("weight") and name + CHANNEL_SCALES in shapes:
            _check_channels(name, shape, shapes[name + CHANNEL_SCALES])
            float_shapes[name] = shape
            readers[name] = lambda name: read(name).astype(np.float32) * read(name + CHANNEL_SCALES).astype(np.float32)
        elif not _is_scale(name, shapes):
            float_shapes[name], readers[name] = shape, read
    return float_shapes, lambda name: readers[name](name)


def read_float8(file: Path, name: str) -> np.ndarray:
    """Read an FP8 tensor, which safetensors' NumPy interface does not support."""
    with file.open("rb") as opened:
        header_size = int.from_bytes(opened.read(8), "little")
        entry = json.loads(opened.read(header_size))[name]
        start, end = entry["data_offsets"]
        opened.seek(8 + header_size + start)
        return np.frombuffer(opened.read(end - start), ml_dtypes.float8_e4m3fn).reshape(entry["shape"])


def _is_scale(name: str, shapes: Shapes) -> bool:
    """True for the scales of a quantized tensor."""
    return (name.endswith(SCALES) and name.removesuffix(SCALES) + BLOCKS in shapes) or (
        name.endswith((TILE_SCALES, "weight" + CHANNEL_SCALES)) and name[: name.rindex("_scale")] in shapes
    )


def _check_channels(name: str, shape: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Raise UnsupportedError for scales of groups of inputs."""
    if scales not in ((), (1,), (1, 1), (shape[0], 1)):
        raise UnsupportedError(f"scales of shape {list(scales)} for {name} {list(shape)} (supported: one per channel)")


def _dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    values = np.stack([E2M1_VALUES[blocks & 0x0F], E2M1_VALUES[blocks >> 4]], axis=-1)
    values = values.reshape(*scales.shape, -1)
    scaled = np.ldexp(values, scales.astype(np.int32)[..., None] - EXPONENT_BIAS)
    return scaled.reshape(*scales.shape[:-1], -1).swapaxes(-1, -2)


def _dequantize_tiles(weight: np.ndarray, scales: np.ndarray, tile: tuple[int, ...]) -> np.ndarray:
    rows, columns = weight.shape
    factors = np.repeat(np.repeat(scales.astype(np.float32), tile[0], axis=0), tile[1], axis=1)
    return weight.astype(np.float32) * factors[:rows, :columns]


# The index of a model of 10^5 tensors has 10 MB.
MAX_INDEX_BYTES = 2**28
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def hf_source(key: str, location: str, folder: Path) -> Source:
    """Open a folder whose model_type has a table; quantized tensors are dequantized when read."""
    settings = read_settings(key, location, folder)
    table = find_table(key, location, settings)
    file_of: dict[str, tuple[Path, str]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _safetensors_files(key, location, folder):
        try:
            file_shapes = _read_shapes(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(Problem(key, f"{file.name} cannot be read: {error}", value=location)) from None
        shapes |= {table.current_name(name): shape for name, shape in file_shapes.items()}
        file_of |= {table.current_name(name): (file, name) for name in file_shapes}

    model = build_model(key, location, to_model_values(key, location, table, settings))

    def read(name: str) -> np.ndarray:
        file, name = file_of[name]
        with safe_open(file, framework="numpy") as opened:
            if opened.get_slice(name).get_dtype() == FLOAT8:
                return read_float8(file, name)
            array: np.ndarray = opened.get_tensor(name)
        return array

    try:
        float_shapes, read_float = dequantized_view(settings, shapes, read)
    except UnsupportedError as error:
        raise ConfigError(Problem(key, f"{CONFIG} has {error}", value=location)) from None
    return Source(key=key, location=location, table=table, model=model, shapes=float_shapes, read=read_float)


def _safetensors_files(key: str, location: str, folder: Path) -> list[Path]:
    """The safetensors files, from the index if there is one; never a pickle, which can run code when it is read."""
    names = [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(read_json(folder / INDEX, max_bytes=MAX_INDEX_BYTES)["weight_map"].values()))
            if not all(isinstance(name, str) for name in names):
                raise ValueError("weight_map does not map names to files")
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(Problem(key, f"{INDEX} cannot be read: {error}", value=location)) from None
    files = [folder / Path(name).name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        more = f" and {len(missing) - 1} more files listed in {INDEX}" if len(missing) > 1 else ""
        hint = "weights in .bin or .pt files can run code when read; save them as safetensors"
        accepted = f"{SINGLE}, or {INDEX}"
        raise ConfigError(Problem(key, f"has no {missing[0]}{more}", value=location, accepted=accepted, hint=hint))
    return files


def _read_shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="numpy") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
