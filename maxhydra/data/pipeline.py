"""Everything between a config and rows: sources opened once, streams over shares of them, readers ahead of need."""

import importlib
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property, partial
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data, OnError, PackingMethod
from maxhydra.data.encode import Encoded, Encoder
from maxhydra.data.mixture import MixtureStream, shares
from maxhydra.data.packing import plan
from maxhydra.data.read_ahead import Chunk, Chunks, IndexedChunks, StreamedChunks, ahead
from maxhydra.data.record_types import RecordType, build_record_type
from maxhydra.data.records import BadRecord, Record, Records, RecordStream, bad_record_error
from maxhydra.data.rows import PackedRows, Row, RowSpec, pack_rows, stack_rows
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RecordSource, RowSource, Source, StreamSource, open_source
from maxhydra.data.stream import PackedStream, RowStream, Stream
from maxhydra.data.workers import WorkerDied, Workers

log = logging.getLogger("maxhydra")

# Threads that read ahead where there are no worker processes: while one waits for a disk, the other tokenizes.
THREADS = 2

TRAIN, EVALUATION = "train", "evaluation"


class Pipeline:
    """The opened sources of a data config."""

    def __init__(self, data: Data, spec: RowSpec):
        self.data, self.spec = data, spec
        self._corpora = data.corpora()
        self.sources: dict[str, Source] = {
            name: open_source(corpus, data, spec) for name, corpus in self._corpora.items()
        }

    @property
    def has_rows(self) -> bool:
        """Whether rows are there by index, so that skipping one costs nothing."""
        return all(isinstance(source, RowSource) for source in self.sources.values())

    def stream(self, *, share: int, shares_in_all: int) -> Stream:
        """One share of the rows to train on, without end."""
        shuffle = self.data.shuffle
        streams = {
            name: self._stream(name, TRAIN, share=(share, shares_in_all), epochs=None, shuffle=shuffle)
            for name in self.sources
        }
        return streams[""] if "" in streams else MixtureStream(streams, shares(self.data, self._sizes()))

    def held_out(self) -> Iterator[Stream]:
        """The rows to evaluate on, in order, source by source."""
        for name, source in self.sources.items():
            if isinstance(source, StreamSource) or len(source.evaluation):
                yield self._stream(name, EVALUATION, share=(0, 1), epochs=1, shuffle=False)

    def first_rows(self, count: int) -> list[Row]:
        """The first rows to train on, in the order of the source."""
        rows: list[Row] = []
        for name in self.sources:
            stream = self._stream(name, TRAIN, share=(0, 1), epochs=1, shuffle=False)
            try:
                while len(rows) < count:
                    rows.append(stream.take())
            except StopIteration:
                continue
            finally:
                stream.close()
        if len(rows) < count:
            batches = self.data.overfit_batches or 1
            reason = self._there_are(len(rows))
            accepted = f"1 to {len(rows) // (count // batches)}"
            raise ConfigError(Problem("data.overfit_batches", reason, value=batches, accepted=accepted))
        return rows

    def check_enough(self, batch: int) -> None:
        """Rows that can be counted must fill a batch at least."""
        if not self.has_rows:
            return
        count = sum(size or 0 for size in self._sizes().values())
        if count < batch:
            reason = f"{self._there_are(count)}, and a batch takes {batch}"
            hint = "give it more text, or set train.seq_len, train.per_device_batch_size or data.eval_fraction lower"
            raise ConfigError(Problem("data", reason, hint=hint))

    def _there_are(self, count: int) -> str:
        length = f"train.seq_len={self.spec.seq_len}"
        return f"data.source={self.data.source} holds {count} sequences of {length} to train on"

    def encoder(self, name: str, part: str) -> Encoder:
        """What turns a payload of a source into examples; also what a worker process runs."""
        corpus, opened = self._corpora[name], getattr(self.sources[name], part)
        is_stream = isinstance(self.sources[name], StreamSource)
        return Encoder(
            read=_numbered if is_stream else opened.read,
            location=partial(_place_by_number if is_stream else _place_by_index, opened),
            formatting=_function(corpus.formatting),
            shape=self._record_type(name, part),
            longest=self.spec.seq_len,
        )

    def chunks(self, name: str, part: str, *, share: tuple[int, int], shuffle: bool) -> Chunks:
        """A share of a source's records, a few at a time, for the source's encoder."""
        source, opened = self.sources[name], getattr(self.sources[name], part)
        if isinstance(source, StreamSource):
            return StreamedChunks(opened, *share)
        assert isinstance(source, RecordSource)
        groups = tuple(opened.groups) if opened.groups else None
        return IndexedChunks(ShuffleOrder(len(opened), self.spec.seed, shuffle, groups), *share)

    def close(self) -> None:
        """End the readers."""
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=True, cancel_futures=True)
            del self._pool

    def _sizes(self) -> dict[str, int | None]:
        return {
            name: None if isinstance(source, StreamSource) else len(source.train)
            for name, source in self.sources.items()
        }

    def _stream(self, name: str, part: str, *, share: tuple[int, int], epochs: int | None, shuffle: bool) -> Stream:
        source, opened = self.sources[name], getattr(self.sources[name], part)
        if not isinstance(source, StreamSource):
            self._check_length(name, len(opened), share[1])
        if isinstance(source, RowSource):
            order = ShuffleOrder(len(opened), self.spec.seed, shuffle)
            return RowStream(opened, order, share=share[0], shares=share[1], epochs=epochs)
        return PackedStream(
            self.chunks(name, part, share=share, shuffle=shuffle),
            partial(self._ahead, name, part),
            partial(self._pack, self._record_type(name, part), share[0] if shuffle else None),
            window=self.data.packing.window * self.spec.seq_len,
            on_bad_record=self.on_bad_record,
            epochs=epochs,
        )

    def _check_length(self, name: str, length: int, readers: int) -> None:
        if length < readers:
            where = f"data.sources.{name}" if name else "data"
            reason = f"holds {length} records, which {readers} readers cannot share"
            raise ConfigError(Problem(where, reason, hint="give it more records, or set data.streams lower"))

    def _record_type(self, name: str, part: str) -> RecordType:
        source = self.sources[name]
        if part == EVALUATION and isinstance(source, RecordSource) and source.evaluation_record_type is not None:
            return source.evaluation_record_type
        return self._record_types[name]

    @cached_property
    def _record_types(self) -> dict[str, RecordType]:
        return {
            name: build_record_type(corpus, self.data, self.spec.seq_len)
            for name, corpus in self._corpora.items()
            if not isinstance(self.sources[name], RowSource)
        }

    def _ahead(self, name: str, part: str, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Chunks with their examples, a few ahead."""
        workers = self.data.workers
        work: Callable[[Any], Encoded] = partial(_work, name, part) if workers else self.encoder(name, part)
        try:
            yield from ahead(chunks, work, self._pool, depth=2 * workers if workers else THREADS)
        except WorkerDied:
            self.close()
            reason = "a worker process ended in the middle of its work, perhaps for want of memory"
            hint = "set data.workers lower, or 0 to do the work in the training process"
            raise ConfigError(Problem("data.workers", reason, value=workers, hint=hint)) from None

    @cached_property
    def _pool(self) -> Executor:
        if not self.data.workers:
            return ThreadPoolExecutor(THREADS, thread_name_prefix="read")
        return Workers(self.data.workers, partial(_begin, self.data, self.spec))

    def _pack(self, shape: RecordType, share: int | None, examples: list[Any], key: tuple[int, ...]) -> PackedRows:
        """The rows of a window. Packing sorts by length, so they are shuffled, unless the share is None."""
        seq_len, packing = self.spec.seq_len, self.data.packing
        if shape.packs:
            documents = [document for document in examples if document.places]
            lengths = np.array([document.places for document in documents], np.int64)
            with_segments = packing.method is not PackingMethod.none
            rows = pack_rows(documents, plan(lengths, seq_len, packing), seq_len, with_segments=with_segments)
        else:
            rows = stack_rows([shape.row(example, seq_len) for example in examples])
        highest = max(
            (int(a.max()) for name, a in rows.arrays.items() if name.endswith(("tokens", "targets", "ids"))), default=0
        )
        if highest >= self.spec.vocab_size:
            reason = f"is under a token of the data, {highest}"
            raise ConfigError(Problem("model.vocab_size", reason, value=self.spec.vocab_size))
        if share is None:
            return rows
        return rows.taken(np.random.default_rng((self.spec.seed, share, *key)).permutation(len(rows)))

    def on_bad_record(self, bad_record: BadRecord) -> None:
        """A record that cannot be used: what data.on_error says."""
        if self.data.on_error is OnError["raise"]:
            raise bad_record_error(bad_record)
        log.warning("skipped %s: %s", bad_record.location, bad_record.reason)


def _numbered(payload: Any) -> list[Record | BadRecord]:
    return [record for _, record in payload]


def _place_by_number(stream: RecordStream, payload: Any, at: int) -> str:
    return stream.location(payload[at][0])


def _place_by_index(records: Records, payload: Any, at: int) -> str:
    return records.location(int(payload[at]))


def _function(path: str | None) -> Callable[[Record], Record] | None:
    """The function at an import path."""
    if path is None:
        return None
    module, name = path.split(":")
    try:
        function: Callable[[Record], Record] = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        hint = "is its folder on PYTHONPATH?"
        raise ConfigError(Problem("data.formatting", str(error), value=path, hint=hint)) from None
    return function


# What a worker process holds: its config, then its pipeline, then the encoders of its sources.
_worker_state: dict[str, Any] = {}


def _begin(data: Data, spec: RowSpec) -> None:
    """Sources are opened with the first chunk: what goes wrong there is raised where the chunk is waited for."""
    _worker_state["open"] = partial(Pipeline, data, spec)


def _work(name: str, part: str, payload: Any) -> Encoded:
    if "pipeline" not in _worker_state:
        _worker_state["pipeline"] = _worker_state["open"]()
    key = f"{name}/{part}"
    if key not in _worker_state:
        _worker_state[key] = _worker_state["pipeline"].encoder(name, part)
    encoded: Encoded = _worker_state[key](payload)
    return encoded
