"""Shards: a source of records as ArrayRecord files of tokens, each made by one process from its share of them."""

import dataclasses
import os
from collections.abc import Callable, Iterator, MutableSequence
from functools import cached_property
from pathlib import Path

import numpy as np
from array_record.python.array_record_module import ArrayRecordWriter

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.corpus import READY_ROWS
from maxhydra.config.schema.data import Data, OnError
from maxhydra.data.array_codec import encode_arrays
from maxhydra.data.document import Document
from maxhydra.data.encode import Encoded, Encoder
from maxhydra.data.formats import ConcatRecords
from maxhydra.data.pipeline import TRAIN, Pipeline
from maxhydra.data.read_ahead import Chunks, IndexedChunks, StreamedChunks
from maxhydra.data.records import BadRecord, Record, Records, RecordStream, unusable
from maxhydra.data.rows import RowSpec
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import Part, RecordSource
from maxhydra.data.special_tokens import smallest
from maxhydra.data.tokenizers import tokenizer

# Records by themselves and as they are: of documents of 600 tokens, 7 microseconds to read one at random, where 8 to a
# group take 9, compressed 11, both 22. Compression would save a third of the space.
OPTIONS = "group_size:1,uncompressed"

# Numbers that a worker counts up for each shard, for others to see.
COUNTED = 2


@dataclasses.dataclass(frozen=True)
class Written:
    """What a finished shard holds."""

    shard: int
    records: int
    tokens: int
    bytes: int
    faults: list[BadRecord]


Enrich = Callable[[list[Document]], list[Document]]


class Shards:
    """The shards of a source, in a folder. Shard s of S holds the s-th part of the records, in their order."""

    def __init__(self, data: Data, folder: Path, count: int, enrich: Enrich = list):
        """`enrich` is what is made of some documents before they are written."""
        self._data, self._folder, self._count, self._enrich = data, folder, count, enrich
        _check_source(data)
        # Rows are not made here, so their length is no matter.
        self._pipeline = Pipeline(data, RowSpec(seq_len=1, vocab_size=tokenizer(data).vocab_size, seed=0))
        if self.records is not None and self.records < count:
            reason = f"is over the {self.records} records that there are"
            raise ConfigError(Problem("task.shards", reason, value=count))

    def name(self, shard: int) -> str:
        return f"tokens-{shard:05d}-of-{self._count:05d}.array_record"

    @property
    def records(self) -> int | None:
        """How many there are, where that can be known."""
        return None if self._all is None else len(self._all)

    def sample(self, count: int) -> list[Record | BadRecord]:
        """A few records from all over the source, by which it can be known again; a stream has none."""
        if self._all is None:
            return []
        return self._all.read(np.unique(np.linspace(0, len(self._all) - 1, count).astype(int)).tolist())

    def write(self, shard: int, counted: MutableSequence[int]) -> Written:
        """Make a shard: under another name until it is whole and on the disk."""
        path = self._folder / self.name(shard)
        partial = path.with_name(f".{path.name}.partial")
        records = seen = tokens = 0
        faults: list[BadRecord] = []
        writer = ArrayRecordWriter(str(partial), OPTIONS)
        for encoded in self._encoded(shard):
            faults += self._checked(encoded.faults)
            documents = self._enrich(encoded.examples)
            for document in documents:
                writer.write(encode_arrays(self._arrays(document)))
                tokens += len(document.tokens)
            records += len(documents)
            seen += len(encoded.examples) + len(encoded.faults)
            counted[COUNTED * shard], counted[COUNTED * shard + 1] = seen, tokens
        writer.close()
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        partial.rename(path)
        return Written(shard, records, tokens, path.stat().st_size, faults)

    @cached_property
    def _all(self) -> Records | None:
        """Training's records, and those held out of the same ones; None where they can only be read in order."""
        source = self._pipeline.sources[""]
        if not isinstance(source, RecordSource):
            return None
        train, held_out = source.train, source.evaluation
        if isinstance(train, Part) and isinstance(held_out, Part) and train.records is held_out.records:
            return ConcatRecords([train, held_out])
        return train

    @cached_property
    def _encoder(self) -> Encoder:
        encoder = self._pipeline.encoder("", TRAIN)
        if (records := self._all) is None:
            return encoder
        return dataclasses.replace(
            encoder, read=records.read, place=lambda indices, at: records.place(int(indices[at]))
        )

    def _encoded(self, shard: int) -> Iterator[Encoded]:
        """The share of a shard, a chunk at a time."""
        if self._all is None:
            stream: RecordStream = getattr(self._pipeline.sources[""], TRAIN)
            chunks: Chunks = StreamedChunks(stream, shard, self._count)
        else:
            chunks = IndexedChunks(ShuffleOrder(len(self._all), 0, shuffle=False), shard, self._count)
        yield from (self._encoder(chunk.payload) for chunk in chunks.follow(None, 1))

    def _checked(self, faults: list[BadRecord]) -> list[BadRecord]:
        if faults and self._data.on_error is OnError["raise"]:
            raise unusable(faults[0])
        return faults

    def _arrays(self, document: Document) -> dict[str, np.ndarray]:
        arrays = {"tokens": document.tokens.astype(self.dtype), **document.columns}
        if document.weights is not None:
            whole = np.isin(document.weights, (0, 1)).all()
            arrays["weights"] = document.weights.astype(np.uint8 if whole else np.float32)
        return arrays

    @cached_property
    def dtype(self) -> np.dtype:
        """The smallest type that holds every token."""
        return np.dtype(smallest(tokenizer(self._data).vocab_size))


def _check_source(data: Data) -> None:
    if data.source == "mixture" or data.source in READY_ROWS:
        hint = "tokenize the sources of a mixture one by one" if data.source == "mixture" else "see data=grain"
        raise ConfigError(Problem("data.source", "holds no records to tokenize", value=data.source, hint=hint))
    if data.record_type not in ("text", "chat"):
        reason = "is no shape whose tokens can be written"
        raise ConfigError(Problem("data.record_type", reason, value=data.record_type, accepted="text, chat"))
