"""Weights in a Hugging Face folder: config.json and safetensors, in one file or several with an index."""

import json
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from maxhydra.config import ConfigError, Problem
from maxhydra.convert.dequantize import FLOAT8, read_float8, unpacked
from maxhydra.convert.hf_config import CONFIG, model_of, read_settings, table_of, values_of
from maxhydra.convert.name_table import UnsupportedError
from maxhydra.convert.source import Source

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


def hf_source(key: str, location: str, folder: Path) -> Source:
    """A folder whose model_type has a table."""
    settings = read_settings(key, location, folder)
    table = table_of(key, location, settings)
    where: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _files(key, location, folder):
        try:
            found = _shapes(file)
        except (OSError, SafetensorError) as error:
            raise ConfigError(Problem(key, f"{file.name} cannot be read: {error}", value=location)) from None
        shapes |= found
        where |= dict.fromkeys(found, file)

    model = model_of(key, location, values_of(key, location, table, settings))

    def read(name: str) -> np.ndarray:
        with safe_open(where[name], framework="numpy") as opened:
            if opened.get_slice(name).get_dtype() == FLOAT8:
                return read_float8(where[name], name)
            array: np.ndarray = opened.get_tensor(name)
        return array

    try:
        plain, read_plain = unpacked(settings, shapes, read)
    except UnsupportedError as error:
        raise ConfigError(Problem(key, f"{CONFIG} has {error}", value=location)) from None
    return Source(key=key, location=location, table=table, model=model, shapes=plain, read=read_plain)


def _files(key: str, location: str, folder: Path) -> list[Path]:
    """The safetensors files, by the index where there is one; never a pickle, which can run code when it is read."""
    names = [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(json.loads((folder / INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ConfigError(Problem(key, f"{INDEX} cannot be read: {error}", value=location)) from None
    files = [folder / Path(name).name for name in names]
    if missing := [file.name for file in files if not file.is_file()]:
        reason = f"has no {missing[0]}" + (f" and {len(missing) - 1} more of its index" if len(missing) > 1 else "")
        hint = "weights in .bin or .pt files can run code when read; save them as safetensors"
        raise ConfigError(Problem(key, reason, value=location, accepted=f"{SINGLE}, or {INDEX}", hint=hint))
    return files


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(file, framework="numpy") as opened:
        return {name: tuple(opened.get_slice(name).get_shape()) for name in opened.keys()}  # noqa: SIM118
