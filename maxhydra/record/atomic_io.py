"""Files that are whole at any moment, and values as strict JSON."""

import contextlib
import json
import math
import os
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import PurePath
from typing import Any, SupportsFloat

# JSON has no numbers for these; the strings read back with float().
NONFINITE = ("NaN", "Infinity", "-Infinity")


def replace_file(path: os.PathLike[str] | str, text: str) -> None:
    """Write beside the file, sync, rename: a reader, or a kill at any moment, finds the old text or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide the run from the rest of a team.
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Make the rename itself durable; some network file systems do not offer it."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Strict JSON: NaN and infinities become the strings of NONFINITE."""
    return json.dumps(plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def plain(value: Any) -> Any:
    """The value made of dicts, lists, strings, numbers and None; array scalars become numbers."""
    match value:
        case None | bool() | int() | str():
            return value
        case Enum():
            return plain(value.value)
        case Mapping():
            return {str(key): plain(item) for key, item in value.items()}
        case PurePath():
            return str(value)
        case SupportsFloat():
            return _number(float(value))
        case Iterable():
            return [plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} has no JSON form: {value!r}")


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def from_number(value: Any) -> Any:
    """Undo what `to_json` does to a number."""
    return float(value) if value in NONFINITE else value
