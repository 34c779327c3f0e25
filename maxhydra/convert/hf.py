"""Read a Hugging Face folder: config.json and safetensors, in one file or in shards with an index."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.dequantize import FLOAT8, dequantized_view, read_float8
from maxhydra.convert.hf_config import CONFIG, build_model, find_table, read_settings, to_model_values
from maxhydra.convert.name_table import UnsupportedError
from maxhydra.convert.source import Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def hf_source(key: str, location: str, folder: Path) -> Source:
    """Open a folder whose model_type has a table; quantized tensors are dequantized when read."""
    settings = read_settings(key, location, folder)
    table = find_table(key, location, settings)
    file_of: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _safetensors_files(key, location, folder):
        try:
            file_shapes = _read_shapes(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(Problem(key, f"{file.name} cannot be read: {error}", value=location)) from None
        shapes |= file_shapes
        file_of |= dict.fromkeys(file_shapes, file)

    model = build_model(key, location, to_model_values(key, location, table, settings))

    def read(name: str) -> np.ndarray:
        with safe_open(file_of[name], framework="numpy") as opened:
            if opened.get_slice(name).get_dtype() == FLOAT8:
                return read_float8(file_of[name], name)
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
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
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
