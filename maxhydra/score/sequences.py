"""Sequences of tokens from a file, every mistake with its line or row."""

import dataclasses
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.tasks.score import LINES
from maxhydra.record.atomic_io import to_json

KEY = "task.input"
SHOWN = 5
Encode = Callable[[str], list[int]]


@dataclasses.dataclass(frozen=True)
class Sequence:
    """Tokens, where they stand in their row, and what else the record said."""

    ids: np.ndarray
    places: np.ndarray
    rest: dict[str, Any]


Found = tuple[str, Sequence | str]
"""A place in the file, and the sequence there, or why there is none."""


@dataclasses.dataclass(frozen=True)
class Sequences:
    """All sequences of a file; `width` is the length of a row with its padding."""

    rows: list[Sequence]
    width: int


def read_sequences(path: Path, *, encode: Encode, vocab_size: int, longest: int) -> Sequences:
    """ConfigError with all that is wrong, or the first of it."""
    if not path.is_file():
        raise ConfigError(Problem(KEY, "is no file", value=str(path), accepted=".jsonl or .npz"))
    found, width = _lines(path, encode) if path.name.endswith(LINES) else _arrays(path)
    problems = []
    for place, sequence in found:
        reason = sequence if isinstance(sequence, str) else _unusable(sequence.ids, vocab_size, longest)
        if reason:
            problems.append(Problem(KEY, f"{place}: {reason}", value=str(path)))
    if problems:
        raise ConfigError(problems[:SHOWN])
    rows = [sequence for _, sequence in found if isinstance(sequence, Sequence)]
    if not rows:
        raise ConfigError(Problem(KEY, "holds no sequences", value=str(path)))
    return Sequences(rows, width)


def _unusable(ids: np.ndarray, vocab_size: int, longest: int) -> str:
    if not len(ids):
        return "holds no tokens"
    if len(ids) > longest:
        return f"holds {len(ids)} tokens, model.context_length is {longest}"
    if wrong := [int(id) for id in ids if not 0 <= id < vocab_size]:
        return f"holds the token {wrong[0]}, model.vocab_size is {vocab_size}"
    return ""


def _lines(path: Path, encode: Encode) -> tuple[list[Found], int]:
    found: list[Found] = []
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                try:
                    found.append((f"line {number}", _record(json.loads(line), encode)))
                except (ValueError, OverflowError, RecursionError) as error:
                    found.append((f"line {number}", str(error)))
    lengths = [len(sequence.ids) for _, sequence in found if isinstance(sequence, Sequence)]
    return found, max(lengths, default=0)


def _record(record: Any, encode: Encode) -> Sequence | str:
    if not isinstance(record, dict) or ("text" in record) == ("ids" in record):
        return "is not an object with either text or ids"
    given = record.get("ids", record.get("text"))
    if isinstance(given, str):
        given = encode(given)
    if not isinstance(given, list) or any(type(id) is not int for id in given):
        return "text is not a text, or ids are not whole numbers"
    rest = {name: value for name, value in record.items() if name not in ("text", "ids")}
    # Half a character, which JSON can write and UTF-8 cannot.
    to_json(rest).encode()
    return Sequence(np.asarray(given, np.int64), np.arange(len(given)), rest)


def _arrays(path: Path) -> tuple[list[Found], int]:
    ids, mask = _loaded(path)
    places = [np.flatnonzero(row) for row in mask]
    return [(f"row {at}", Sequence(ids[at][real], real, {})) for at, real in enumerate(places)], ids.shape[1]


def _loaded(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; never a pickle, which can run code when it is read."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            held = {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise ConfigError(Problem(KEY, f"cannot be read: {error}", value=str(path))) from None
    ids = held.get("ids")
    if ids is None or ids.ndim != 2 or ids.dtype.kind not in "iu":
        raise ConfigError(Problem(KEY, "has no array ids [B, T] of whole numbers", value=str(path)))
    mask = held.get("mask", np.ones(ids.shape, np.int32))
    if mask.shape != ids.shape or not np.isin(mask, (0, 1)).all():
        raise ConfigError(Problem(KEY, f"has no mask of zeros and ones in the shape of ids, {ids.shape}", str(path)))
    return ids.astype(np.int64), mask
