"""Record types: how a record becomes a training example. One module per type, chosen by data.record_type.

Each module has `build(corpus, data, seq_len) -> RecordType`. The columns it reads are in `config.schema.corpus.ROLES`.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from maxhydra.config.schema.data import IMAGE_TYPES, Corpus, Data
from maxhydra.config.schema.encoders import has_audio
from maxhydra.data.records import Record
from maxhydra.data.rows import Row, RowSpec

# Largest token id that fits in the int32 of a row.
LAST_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class Rejected:
    """A record that cannot become an example, with the reason."""

    reason: str


class RecordType(Protocol):
    """Converts records of one type into examples."""

    packs: bool
    """True if examples are Documents, several of which can share a row."""

    def encode(self, records: Sequence[Record]) -> list[Any]:
        """Encode each record into an example, or a Rejected."""
        ...

    def row(self, example: Any, seq_len: int) -> Row:
        """Build the row of one example, for a type that does not pack."""
        ...


def build_record_type(corpus: Corpus, data: Data, spec: RowSpec) -> RecordType:
    """Build the record type of a corpus for the rows of a run."""
    module = importlib.import_module(f"{__name__}.{corpus.record_type}")
    images = {"vision": spec.vision} if corpus.record_type in IMAGE_TYPES else {}
    audio = {"audio": spec.audio} if has_audio(corpus.record_type, spec.vision) else {}
    built: RecordType = module.build(corpus, data, spec.seq_len, **images, **audio)
    return built


def first_rejection(values: Sequence[Any]) -> Rejected | None:
    """Return the first of the values that is a Rejected."""
    return next((value for value in values if isinstance(value, Rejected)), None)


def column_of(record: Record, corpus: Corpus, role: str) -> Any:
    """Return the column of a record for a role, or a Rejected that lists the columns it has."""
    name = corpus.columns.get(role, role)
    if name in record:
        return record[name]
    return Rejected(
        f"has no column {name!r}, only {', '.join(map(repr, record)) or 'no columns at all'}; set data.columns.{role}"
    )


def text_of(value: Any, data: Data) -> Any:
    """Return a value as text, or a Rejected."""
    if isinstance(value, Rejected):
        return value
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Rejected(f"is not valid UTF-8: {error}")
    if not isinstance(value, str):
        return Rejected(f"expected text, found {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Rejected(f"is not valid Unicode: {error}")
    if len(value) > data.max_characters:
        return Rejected(f"has {len(value):,} characters, more than data.max_characters={data.max_characters:,}")
    return value


def array_of(value: Any) -> Any:
    """Return numbers as an array, or a Rejected."""
    try:
        return value if isinstance(value, Rejected) else np.asarray(value)
    except ValueError as error:
        return Rejected(f"expected an array of numbers: {error}")


def ids_of(value: Any) -> Any:
    """Return token ids as an array, or a Rejected: a negative id would index the embedding from the end."""
    ids = array_of(value)
    if isinstance(ids, Rejected) or ids.dtype.kind not in "iu" or not ids.size:
        return ids
    # uint16, which task=tokenize mostly writes, is always in range.
    is_narrow = ids.dtype.kind == "u" and ids.dtype.itemsize < 4
    if is_narrow or 0 <= ids.min() <= ids.max() <= LAST_ID:
        return ids
    return Rejected(f"token ids range from {ids.min()} to {ids.max()}, expected 0 to {LAST_ID}")


def weights_of(value: Any, count: int) -> Any:
    """Return the loss weight of each token: an array, None if the record has none, or a Rejected."""
    weights = value if value is None else array_of(value)
    if weights is None or isinstance(weights, Rejected):
        return weights
    if weights.shape != (count,):
        return Rejected(f"has weights of shape {weights.shape} for {count} tokens")
    if weights.dtype.kind not in "biuf" or not np.isfinite(weights).all():
        return Rejected("has weights that are not finite numbers")
    return weights.astype(np.float32)
