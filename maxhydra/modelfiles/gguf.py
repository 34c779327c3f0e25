"""GGUF, the file format of llama.cpp: named values, among them the tokenizer, and named tensors, often quantized.

Read through the `gguf` package, which maps the file and dequantizes; nothing in such a file is code.
"""

import importlib
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem


class GgufFile:
    """One file. Tensors are mapped, and become numbers one at a time."""

    def __init__(self, path: Path, reader: Any, dequantize: Any):
        self.path = path
        self._tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._dequantize = dequantize
        self.values: Mapping[str, Any] = {name: field.contents() for name, field in reader.fields.items()}
        """Everything that the file says, by its dotted name."""
        self.shapes: Mapping[str, tuple[int, ...]] = {
            name: tuple(int(size) for size in tensor.shape[::-1]) for name, tensor in self._tensors.items()
        }
        """Shape of every tensor, rows first as numpy counts; the file writes it the other way round."""

    def read(self, name: str) -> np.ndarray:
        """A tensor in float32."""
        tensor = self._tensors[name]
        numbers: np.ndarray = self._dequantize(tensor.data, tensor.tensor_type)
        return numbers.reshape(self.shapes[name])


def open_gguf(key: str, path: Path) -> GgufFile:
    """Open a file that the config field `key` names. The tokenizer and the weights of a run share one reading of it."""
    try:
        return _opened(path, path.stat().st_mtime_ns)
    except ModuleNotFoundError as error:
        if error.name != "gguf":
            raise
        reason = "needs the package gguf, which is not installed"
        raise ConfigError(Problem(key, reason, value=path, hint="pip install 'maxhydra[gguf]'")) from None
    except (OSError, ValueError, KeyError, IndexError, OverflowError, MemoryError) as error:
        raise ConfigError(Problem(key, f"cannot be read as a GGUF file: {error}", value=path)) from None


@lru_cache(maxsize=2)
def _opened(path: Path, _written: int) -> GgufFile:
    library = importlib.import_module("gguf")

    class Reader(library.GGUFReader):  # type: ignore[name-defined,misc]
        """Reads from a plain view of the mapped file: slicing a numpy memmap 250,000 times takes 3.5 s more."""

        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = mapped.view(np.ndarray)

    return GgufFile(path, Reader(path), importlib.import_module("gguf.quants").dequantize)
