"""What a record means. A module of this package is one shape, chosen by data.shape.

Each has `build(corpus, data, seq_len) -> Shape`. The columns that a shape reads are in `maxhydra.config.corpus.ROLES`.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any, Protocol

from maxhydra.config.corpus import Corpus
from maxhydra.config.data import Data
from maxhydra.data.records import Record
from maxhydra.data.rows import Row


@dataclasses.dataclass(frozen=True)
class Refused:
    """Why a record has no example."""

    reason: str


class Shape(Protocol):
    """Makes examples of records."""

    packs: bool
    """Whether an example is a Document, so that several can share a row."""

    def encode(self, records: Sequence[Record]) -> list[Any]:
        """An example or a Refused for each record."""
        ...

    def row(self, example: Any, seq_len: int) -> Row:
        """The row of one example, for a shape that does not pack."""
        ...


def build_shape(corpus: Corpus, data: Data, seq_len: int) -> Shape:
    """The shape that a corpus names, for rows of a length."""
    built: Shape = importlib.import_module(f"{__name__}.{corpus.shape}").build(corpus, data, seq_len)
    return built


def column_of(record: Record, corpus: Corpus, role: str) -> Any:
    """What a record has in a role, or a Refused that says what it has instead."""
    name = corpus.columns.get(role, role)
    if name in record:
        return record[name]
    return Refused(f"no column {name!r}; it has {', '.join(map(repr, record)) or 'none'}")


def text_of(value: Any, data: Data) -> Any:
    """A value as text, or a Refused."""
    if isinstance(value, Refused):
        return value
    if isinstance(value, bytes):
        try:
            value = value.decode()
        except UnicodeDecodeError as error:
            return Refused(f"not UTF-8: {error}")
    if not isinstance(value, str):
        return Refused(f"not text but {type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return Refused(f"not Unicode text: {error}")
    if len(value) > data.max_characters:
        return Refused(f"{len(value):,} characters, over data.max_characters={data.max_characters:,}")
    return value
