"""Where records or rows come from. A module of this package is one kind of source, chosen by `source`.

Each has `open_source(corpus, data, spec) -> Source`; `data` is the whole section, for the tokenizer and the cache.
"""

import dataclasses
import importlib
from collections.abc import Sequence

from maxhydra.config.schema.corpus import ROLES, Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.record_types import RecordType
from maxhydra.data.records import BadRecord, Record, Records, RecordStream
from maxhydra.data.rows import Rows, RowSpec


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Rows to train on and rows held out, ready to be batched."""

    train: Rows
    evaluation: Rows


@dataclasses.dataclass(frozen=True)
class RecordSource:
    """Records to train on and records held out."""

    train: Records
    evaluation: Records
    evaluation_shape: RecordType | None = None
    """What the held-out records mean, where it is something else than data.record_type."""


@dataclasses.dataclass(frozen=True)
class StreamSource:
    """Streams of records to train on and to evaluate on."""

    train: RecordStream
    evaluation: RecordStream


Source = RowSource | RecordSource | StreamSource


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> Source:
    """The source that a corpus names."""
    opened: Source = importlib.import_module(f"{__name__}.{corpus.source}").open_source(corpus, data, spec)
    return opened


def columns_of(corpus: Corpus) -> tuple[str, ...] | None:
    """The columns that the shape must have; not known where a function comes before it."""
    if corpus.formatting is not None:
        return None
    return tuple(corpus.columns.get(role, role) for role in ROLES[corpus.record_type])


@dataclasses.dataclass(frozen=True)
class Part:
    """Some consecutive records of others."""

    records: Records
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return self.records.read([self.first + int(index) for index in indices])

    def place(self, index: int) -> str:
        return self.records.place(self.first + index)

    @property
    def groups(self) -> list[int] | None:
        if self.records.groups is None:
            return None
        sizes, start = [], 0
        for size in self.records.groups:
            held = min(start + size, self.last) - max(start, self.first)
            sizes += [held] if held > 0 else []
            start += size
        return sizes


def hold_out(records: Records, fraction: float) -> RecordSource:
    """Keep a share of the records, at their end, from training; one at least."""
    boundary = len(records) - min(max(1, round(len(records) * fraction)), len(records))
    return RecordSource(train=Part(records, 0, boundary), evaluation=Part(records, boundary, len(records)))
