"""GGUF, the file format of llama.cpp: metadata (including the tokenizer) and tensors, often quantized.

Read with the `gguf` package, which memory-maps the file and dequantizes; such a file contains no code.
"""

import importlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem


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
