"""What a record means. A module of this package is one shape, chosen by data.record_type.

Each has `build(corpus, data, seq_len) -> RecordType`. The columns it reads are in `config.schema.corpus.ROLES`.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.records import Record
from maxhydra.data.rows import Row

# The last id that a row, of int32, can hold.
LAST_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Rejected:
    """Why a record has no example."""

    reason: str


class RecordType(Protocol):
    """Makes examples of records."""

    packs: bool
    """Whether an example is a Document, so that several can share a row."""

    def encode(self, records: Sequence[Record]) -> list[Any]:
        """An example or a Refused for each record."""
        ...

    def row(self, example: Any, seq_len: int) -> Row:
        """The row of one example, for a shape that does not pack."""
        ...


def build_shape(corpus: Corpus, data: Data, seq_len: int) -> RecordType:
    """The shape that a corpus names, for rows of a length."""
    built: RecordType = importlib.import_module(f"{__name__}.{corpus.record_type}").build(corpus, data, seq_len)
    return built


def column_of(record: Record, corpus: Corpus, role: str) -> Any:
    """What a record has in a role, or a Refused that says what it has instead."""
    name = corpus.columns.get(role, role)
    if name in record:
        return record[name]
    return Rejected(f"no column {name!r}; it has {', '.join(map(repr, record)) or 'none'}")


def text_of(value: Any, data: Data) -> Any:
    """A value as text, or a Refused."""
    if isinstance(value, Rejected):
        return value
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Rejected(f"not UTF-8: {error}")
    if not isinstance(value, str):
        return Rejected(f"not text but {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Rejected(f"not Unicode text: {error}")
    if len(value) > data.max_characters:
        return Rejected(f"{len(value):,} characters, over data.max_characters={data.max_characters:,}")
    return value


def array_of(value: Any) -> Any:
    """Numbers as an array, or a Refused."""
    try:
        return value if isinstance(value, Rejected) else np.asarray(value)
    except ValueError as error:
        return Rejected(f"a list that is no array: {error}")


def ids_of(value: Any) -> Any:
    """Token ids as an array, or a Refused: an id under 0 would be that of another token, counted from the end."""
    ids = array_of(value)
    if isinstance(ids, Rejected) or ids.dtype.kind not in "iu" or not ids.size:
        return ids
    # In 16 bits, as task=tokenize writes most, there are no others.
    is_narrow = ids.dtype.kind == "u" and ids.dtype.itemsize < 4
    if is_narrow or 0 <= ids.min() <= ids.max() <= LAST_ID:
        return ids
    return Rejected(f"ids from {ids.min()} to {ids.max()}, of which no vocabulary has all")


def weights_of(value: Any, count: int) -> Any:
    """What predicting each of some tokens counts for: an array, None where nothing is said, or a Refused."""
    weights = value if value is None else array_of(value)
    if weights is None or isinstance(weights, Rejected):
        return weights
    if weights.shape != (count,):
        return Rejected(f"weights of shape {weights.shape} for {count} tokens")
    if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all():
        return Rejected("weights that are not finite numbers")
    return weights.astype(np.float32)
