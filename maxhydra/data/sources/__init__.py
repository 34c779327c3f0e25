"""Sources of records or rows. One module per kind of source, chosen by data.source.

Each module has `open_source(corpus, data, spec) -> Source`; `data` is the whole section, for the tokenizer and the
cache. One that reads files also has `input_files(corpus, data)`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Sequence
from pathlib import Path

from maxhydra.config.plug_ins import call_plug_in, is_plug_in
from maxhydra.config.schema.data import ROLES, Corpus, Data
from maxhydra.data.files import find_files
from maxhydra.data.record_types import RecordType
from maxhydra.data.records import BadRecord, Record, Records, RecordStream
from maxhydra.data.rows import Rows, RowSpec


@dataclasses.dataclass(frozen=True)
class RowSource:
    """Training and evaluation rows, ready to be batched."""

    train: Rows
    evaluation: Rows


@dataclasses.dataclass(frozen=True)
class RecordSource:
    """Training and evaluation records."""

    train: Records
    evaluation: Records
    evaluation_record_type: RecordType | None = None
    """Record type of the evaluation records, if it differs from data.record_type."""


@dataclasses.dataclass(frozen=True)
class StreamSource:
    """Training and evaluation records that can only be read in order."""

    train: RecordStream
    evaluation: RecordStream


SOURCE_KEY = "data.source"
Source = RowSource | RecordSource | StreamSource


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> Source:
    """Open the source that a corpus names."""
    if is_plug_in(corpus.source):
        own: Source = call_plug_in(corpus.source, corpus, data, spec, options=corpus.options, key=SOURCE_KEY)
        return own
    opened: Source = importlib.import_module(f"{__name__}.{corpus.source}").open_source(corpus, data, spec)
    return opened


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    """Files that a corpus reads, by the field that names them; empty for generated and remote data.

    A module that reads files has its own function `input_files(corpus, data)`. A source of the user reads those in
    path and eval_path.
    """
    if is_plug_in(corpus.source):
        return named_files(corpus, data, ("",))
    module = importlib.import_module(f"{__name__}.{corpus.source}")
    find: Callable[[Corpus, Data], dict[str, list[Path]]] = getattr(module, "input_files", lambda corpus, data: {})
    return find(corpus, data)


def named_files(
    corpus: Corpus, data: Data, endings: tuple[str, ...], fields: Sequence[str] = ("path", "eval_path")
) -> dict[str, list[Path]]:
    """Files that the fields of a corpus name."""
    names = {field: getattr(corpus, field) for field in fields}
    return {field: find_files(name, data.cache, endings=endings) for field, name in names.items() if name is not None}


def columns_of(corpus: Corpus) -> tuple[str, ...] | None:
    """Columns that the record type reads; None if a data.formatting function runs first."""
    if corpus.formatting is not None:
        return None
    return tuple(corpus.columns.get(role, role) for role in ROLES[corpus.record_type])


@dataclasses.dataclass(frozen=True)
class RecordSlice:
    """A consecutive slice of other records."""

    records: Records
    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first

    def read(self, indices: Sequence[int]) -> list[Record | BadRecord]:
        return self.records.read([self.first + int(index) for index in indices])

    def location(self, index: int) -> str:
        return self.records.location(self.first + index)

    @property
    def groups(self) -> list[int] | None:
        if self.records.groups is None:
            return None
        sizes, start = [], 0
        for size in self.records.groups:
            overlap = min(start + size, self.last) - max(start, self.first)
            sizes += [overlap] if overlap > 0 else []
            start += size
        return sizes


def hold_out(records: Records, fraction: float) -> RecordSource:
    """Hold out a fraction of the records at the end, at least one, for evaluation."""
    boundary = len(records) - min(max(1, round(len(records) * fraction)), len(records))
    return RecordSource(
        train=RecordSlice(records, 0, boundary), evaluation=RecordSlice(records, boundary, len(records))
    )
