"""From a data config to streams of rows: opens the sources and connects readers, tokenizers and packing."""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import closing
from functools import cached_property, partial
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.plug_ins import load_object
from maxhydra.config.schema.data import Data, OnError, PackingMethod
from maxhydra.data.packing import plan_rows
from maxhydra.data.read_ahead import Chunk, Chunks, Encoded, Encoder, IndexedChunks, StreamedChunks, map_ahead
from maxhydra.data.record_types import RecordType, build_record_type
from maxhydra.data.records import BadRecord, Record, Records, RecordStream, bad_record_error
from maxhydra.data.rows import BYTES, Document, PackedRows, Row, RowSpec, pack_rows, packing_sizes, stack_rows
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.sources import RecordSource, RowSource, Source, StreamSource, open_source
from maxhydra.data.stream import MixtureStream, PackedStream, RowStream, Stream, mixture_shares
from maxhydra.data.tokenizers import count_token_bytes, load_tokenizer
from maxhydra.data.workers import WorkerDied, Workers

log = logging.getLogger("maxhydra")

# Reader threads without worker processes: while one waits for the disk, the other tokenizes.
THREADS = 2

TRAIN, EVALUATION = "train", "evaluation"


class Pipeline:
    """The opened sources of a data config, and the reader pool that their streams share."""

    def __init__(self, data: Data, spec: RowSpec):
        self.data, self.spec = data, spec
        self._corpora = data.corpora()
        self.sources: dict[str, Source] = {
            name: open_source(corpus, data, spec) for name, corpus in self._corpora.items()
        }

    @property
    def has_rows(self) -> bool:
        """True if all sources have rows by index, so that skipping a row costs nothing."""
        return all(isinstance(source, RowSource) for source in self.sources.values())

    def stream(self, *, share: int, num_shares: int) -> Stream:
        """Open an endless stream over one share of the training rows."""
        shuffle = self.data.shuffle
        streams = {
            name: self._stream(name, TRAIN, share=(share, num_shares), epochs=None, shuffle=shuffle)
            for name in self.sources
        }
        return streams[""] if "" in streams else MixtureStream(streams, mixture_shares(self.data, self._sizes()))

    def held_out(self) -> Iterator[Stream]:
        """Open one stream per source over its evaluation rows, in order."""
        for name, source in self.sources.items():
            if isinstance(source, StreamSource) or len(source.evaluation):
                yield self._stream(name, EVALUATION, share=(0, 1), epochs=1, shuffle=False)

    def first_rows(self, count: int) -> list[Row]:
        """Read the first `count` training rows, in the order of the source."""
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
            reason = self._describe_size(len(rows))
            accepted = f"1 to {len(rows) // (count // batches)}"
            raise ConfigError(Problem("data.overfit_batches", reason, value=batches, accepted=accepted))
        return rows

    def count_training_rows(self) -> int:
        """Rows of one epoch. Records are read, tokenized and packed once to count theirs.

        Raises ConfigError for data of unknown size: streams, and mixtures, whose sources have different lengths.
        """
        if len(self.sources) > 1 or self.data.overfit_batches:
            reason, fix = "of a mixture or of data.overfit_batches has no size", "one source of data"
        elif any(isinstance(source, StreamSource) for source in self.sources.values()):
            reason, fix = "of data that is streamed has no known size", "data.streaming=false, or another source"
        else:
            (name, source), *_ = self.sources.items()
            if isinstance(source, RowSource):
                return len(source.train)
            stream = self._stream(name, TRAIN, share=(0, 1), epochs=1, shuffle=False)
            with closing(stream):
                return _count(stream)
        hint = f"set train.steps instead, or use {fix}"
        raise ConfigError(Problem("train.epochs", f"an epoch {reason}", hint=hint))

    def check_enough(self, batch: int) -> None:
        """Raise if the training rows, where their number is known, do not fill one batch."""
        if not self.has_rows:
            return
        count = sum(size or 0 for size in self._sizes().values())
        if count < batch:
            reason = f"{self._describe_size(count)}, but a batch needs {batch}"
            hint = "add text, or lower train.seq_len, train.per_device_batch_size or data.eval_fraction"
            raise ConfigError(Problem("data", reason, hint=hint))

    def _describe_size(self, count: int) -> str:
        length = f"train.seq_len={self.spec.seq_len}"
        return f"data.source={self.data.source} has only {count} training sequences of {length}"

    def encoder(self, name: str, split: str) -> Encoder:
        """Build the encoder of a source's train or evaluation split; worker processes build their own."""
        corpus, opened = self._corpora[name], getattr(self.sources[name], split)
        is_stream = isinstance(self.sources[name], StreamSource)
        return Encoder(
            read=_records_of_payload if is_stream else opened.read,
            location=partial(_location_by_number if is_stream else _location_by_index, opened),
            formatting=_import_function(corpus.formatting),
            record_type=self._record_type(name, split),
            seq_len=self.spec.seq_len,
        )

    def chunks(self, name: str, split: str, *, share: tuple[int, int], shuffle: bool) -> Chunks:
        """Iterate over one share of a source's records in chunks, for the source's encoder."""
        source, opened = self.sources[name], getattr(self.sources[name], split)
        if isinstance(source, StreamSource):
            return StreamedChunks(opened, *share)
        assert isinstance(source, RecordSource)
        groups = tuple(opened.groups) if opened.groups else None
        return IndexedChunks(ShuffleOrder(len(opened), self.spec.seed, shuffle, groups), *share)

    def close(self) -> None:
        """Stop the reader pool."""
        if "_pool" in self.__dict__:
            self._pool.shutdown(wait=True, cancel_futures=True)
            del self._pool

    def _sizes(self) -> dict[str, int | None]:
        return {
            name: None if isinstance(source, StreamSource) else len(source.train)
            for name, source in self.sources.items()
        }

    def _stream(self, name: str, split: str, *, share: tuple[int, int], epochs: int | None, shuffle: bool) -> Stream:
        source, opened = self.sources[name], getattr(self.sources[name], split)
        if not isinstance(source, StreamSource):
            self._check_length(name, split, share[1])
        if isinstance(source, RowSource):
            order = ShuffleOrder(len(opened), self.spec.seed, shuffle)
            return RowStream(opened, order, share=share[0], shares=share[1], epochs=epochs)
        return PackedStream(
            self.chunks(name, split, share=share, shuffle=shuffle),
            partial(self._encode_ahead, name, split),
            partial(self._pack, self._record_type(name, split), split, share[0] if shuffle else None),
            window=self.data.packing.window * self.spec.seq_len,
            on_bad_record=self.on_bad_record,
            epochs=epochs,
        )

    def _check_length(self, name: str, split: str, readers: int) -> None:
        length = len(getattr(self.sources[name], split))
        if length >= readers:
            return
        reason = f"has {length} records, fewer than the {readers} streams that read it"
        hint = "add records, or set data.streams lower"
        held_out = 0 if split == EVALUATION else len(self.sources[name].evaluation)  # type: ignore[arg-type]
        if not length and held_out:
            reason = f"has {held_out} records, and all are held out for evaluation: at least one always is"
            hint = "add records, or name separate evaluation data in data.eval_path"
        raise ConfigError(Problem(f"data.sources.{name}" if name else "data", reason, hint=hint))

    def _record_type(self, name: str, split: str) -> RecordType:
        source = self.sources[name]
        if split == EVALUATION and isinstance(source, RecordSource) and source.evaluation_record_type is not None:
            return source.evaluation_record_type
        return self._record_types[name]

    @cached_property
    def _record_types(self) -> dict[str, RecordType]:
        return {
            name: build_record_type(corpus, self.data, self.spec)
            for name, corpus in self._corpora.items()
            if not isinstance(self.sources[name], RowSource)
        }

    def _encode_ahead(self, name: str, split: str, chunks: Iterator[Chunk]) -> Iterator[tuple[Chunk, Encoded]]:
        """Read and tokenize chunks ahead of use, in the reader pool."""
        workers = self.data.workers
        encode: Callable[[Any], Encoded] = (
            partial(_encode_in_worker, name, split) if workers else self.encoder(name, split)
        )
        try:
            yield from map_ahead(chunks, encode, self._pool, depth=2 * workers if workers else THREADS)
        except WorkerDied:
            self.close()
            reason = "a worker process died, possibly killed for lack of memory"
            hint = "set data.workers lower, or 0 to tokenize in the training process"
            raise ConfigError(Problem("data.workers", reason, value=workers, hint=hint)) from None

    @cached_property
    def _pool(self) -> Executor:
        if not self.data.workers:
            return ThreadPoolExecutor(THREADS, thread_name_prefix="read")
        return Workers(self.data.workers, partial(_init_worker, self.data, self.spec))

    def _pack(
        self, record_type: RecordType, split: str, share: int | None, examples: list[Any], key: tuple[int, ...]
    ) -> PackedRows:
        """Pack the examples of a window into rows, shuffled (packing sorts by length) unless `share` is None."""
        seq_len, packing = self.spec.seq_len, self.data.packing
        if record_type.packs:
            documents = [document for document in examples if document.num_targets]
            if split == EVALUATION:
                documents = self._with_byte_counts(documents)
            lengths = np.array([document.num_targets for document in documents], np.int64)
            with_segments = packing.method is not PackingMethod.none
            has_images = any(document.images is not None for document in documents)
            sizes = packing_sizes(documents, seq_len) if has_images else None
            plan = plan_rows(lengths, seq_len, packing, sizes=sizes)
            rows = pack_rows(documents, plan, seq_len, with_segments=with_segments)
        else:
            rows = stack_rows([record_type.row(example, seq_len) for example in examples])
        highest = max(
            (int(a.max()) for name, a in rows.arrays.items() if name.endswith(("tokens", "targets", "ids"))), default=0
        )
        if highest >= self.spec.vocab_size:
            reason = f"is too small: the data has token id {highest}"
            raise ConfigError(Problem("model.vocab_size", reason, value=self.spec.vocab_size))
        if share is None:
            return rows
        return rows.reorder(np.random.default_rng((self.spec.seed, share, *key)).permutation(len(rows)))

    def _with_byte_counts(self, documents: list[Document]) -> list[Document]:
        """Documents with a column of the bytes of each target; unchanged if the text of one is not known."""
        if any(document.text_bytes is None for document in documents):
            return documents
        tokenizer = load_tokenizer(self.data)
        return [
            dataclasses.replace(
                document,
                columns={
                    **document.columns,
                    BYTES: count_token_bytes(tokenizer, document.tokens, document.text_bytes or 0)[1:],
                },
            )
            for document in documents
        ]

    def on_bad_record(self, bad_record: BadRecord) -> None:
        """Handle a bad record as data.on_error says: raise, or log and skip."""
        if self.data.on_error is OnError["raise"]:
            raise bad_record_error(bad_record)
        log.warning("skipped %s: %s", bad_record.location, bad_record.reason)


def _count(stream: Stream) -> int:
    """Rows of a stream that ends."""
    for count in itertools.count():
        try:
            stream.skip()
        except StopIteration:
            return count
    raise AssertionError


def count_training_rows(data: Data, spec: RowSpec) -> int:
    """Rows of one epoch of the training data."""
    with closing(Pipeline(data, spec)) as pipeline:
        return pipeline.count_training_rows()


def _records_of_payload(payload: Any) -> list[Record | BadRecord]:
    return [record for _, record in payload]


def _location_by_number(stream: RecordStream, payload: Any, at: int) -> str:
    return stream.location(payload[at][0])


def _location_by_index(records: Records, payload: Any, at: int) -> str:
    return records.location(int(payload[at]))


def _import_function(path: str | None) -> Callable[[Record], Record] | None:
    """Import the function at `package.module:function`."""
    return None if path is None else load_object(path, key="data.formatting")


# State of a worker process: how to open the pipeline, then the pipeline and its encoders.
_worker_state: dict[str, Any] = {}


def _init_worker(data: Data, spec: RowSpec) -> None:
    """Store how to open the pipeline.

    Sources are opened with the first chunk, so that an error is raised where the chunk is awaited.
    """
    _worker_state["open"] = partial(Pipeline, data, spec)


def _encode_in_worker(name: str, split: str, payload: Any) -> Encoded:
    if "pipeline" not in _worker_state:
        _worker_state["pipeline"] = _worker_state["open"]()
    key = f"{name}/{split}"
    if key not in _worker_state:
        _worker_state[key] = _worker_state["pipeline"].encoder(name, split)
    encoded: Encoded = _worker_state[key](payload)
    return encoded
