"""Chunks: small batches of records that are read and tokenized ahead of use, in threads or worker processes."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from maxhydra.data.record_types import RecordType, Rejected
from maxhydra.data.records import BadRecord, Cursor, Record, RecordStream
from maxhydra.data.shuffle import ShuffleOrder, share_of

# Records in a chunk: enough for a tokenizer to use its threads, few enough that the first batch is not delayed.
SIZE = 128


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A few records of one epoch, not read yet: the unit of work of a reader.

    `payload` is all that a worker needs to get the records: indices, or numbered records of a stream.
    """

    cursor: Cursor
    """Position before the chunk."""
    after: Cursor
    """Position after the chunk, where the next one starts."""
    payload: Any
    ends_epoch: bool

    @property
    def epoch(self) -> int:
        return int(self.cursor["epoch"])


class Chunks(Protocol):
    """The chunks of one share of a source, iterated from any cursor."""

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        """Iterate from a cursor (None: the start) until `epochs` epochs are complete (None: forever)."""
        ...


@dataclasses.dataclass(frozen=True)
class IndexedChunks:
    """Chunks of `Records`: slices of the shuffled indices of each epoch."""

    order: ShuffleOrder
    share: int
    shares: int

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        first, last = share_of(self.order.length, self.share, self.shares)
        epoch, at = (int(cursor["epoch"]), int(cursor["at"])) if cursor else (0, 0)
        while epochs is None or epoch < epochs:
            start = first + at
            stop = min(start + SIZE, last)
            before = {"epoch": epoch, "at": at}
            indices = self.order.indices(epoch, start, stop)
            epoch, at = (epoch, stop - first) if stop < last else (epoch + 1, 0)
            yield Chunk(before, {"epoch": epoch, "at": at}, indices, ends_epoch=stop == last)


@dataclasses.dataclass(frozen=True)
class StreamedChunks:
    """Chunks of a `RecordStream`, in the order of the stream."""

    stream: RecordStream
    share: int
    shares: int

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        before: Cursor = cursor or {"epoch": 0, "at": None}
        while epochs is None or before["epoch"] < epochs:
            epoch = int(before["epoch"])
            at: Cursor | None = before["at"]
            records: list[tuple[int, Record | BadRecord]] = []
            for record, next_at in self.stream.iter_from(at, share=self.share, shares=self.shares):
                if len(records) == SIZE:
                    after = {"epoch": epoch, "at": at}
                    yield Chunk(before, after, records, ends_epoch=False)
                    before, records = after, []
                at = next_at
                records.append((int(at["number"]), record))
            after = {"epoch": epoch + 1, "at": None}
            yield Chunk(before, after, records, ends_epoch=True)
            before = after


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The tokenized examples of one chunk, and its records that could not be used."""

    examples: list[Any]
    num_tokens: int
    """Row positions that the examples fill."""
    bad_records: list[BadRecord]


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Reads the records of a chunk and tokenizes them: a pure function of the chunk's payload."""

    read: Callable[[Any], Sequence[Record | BadRecord]]
    location: Callable[[Any, int], str]
    """Location of the k-th record of a payload."""
    formatting: Callable[[Record], Record] | None
    record_type: RecordType
    seq_len: int
    """Row positions that an example fills if it is not packed, whatever its length."""

    def __call__(self, payload: Any) -> Encoded:
        bad_records: list[BadRecord] = []
        records: list[Record] = []
        numbers: list[int] = []
        for number, record in enumerate(self.read(payload)):
            if isinstance(record, BadRecord):
                bad_records.append(record)
                continue
            try:
                records.append(self.formatting(record) if self.formatting else record)
                numbers.append(number)
            except Exception as error:  # a user's function may raise anything, and the message must name the record
                reason = f"data.formatting raised {type(error).__name__}: {error}"
                bad_records.append(BadRecord(self.location(payload, number), reason))
        examples = []
        for number, example in zip(numbers, self.record_type.encode(records), strict=True):
            if isinstance(example, Rejected):
                bad_records.append(BadRecord(self.location(payload, number), example.reason))
            else:
                examples.append(example)
        packs = self.record_type.packs
        num_tokens = sum(example.num_targets for example in examples) if packs else len(examples) * self.seq_len
        return Encoded(examples, num_tokens, bad_records)


def map_ahead(
    chunks: Iterator[Chunk], function: Callable[[Any], Any], pool: Executor, *, depth: int
) -> Iterator[tuple[Chunk, Any]]:
    """Apply `function` to the payload of each chunk in `pool`, in order, with up to `depth` chunks ahead of the reader.

    The first chunk is read alone, and the distance doubles with each chunk used: a short evaluation needs only one.
    """
    pending: deque[tuple[Chunk, Future]] = deque()
    distance = 0
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(function, chunk.payload)))
            if len(pending) > min(distance, depth):
                done, future = pending.popleft()
                yield done, future.result()
                distance = 2 * distance + 1
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        for _, future in pending:
            future.cancel()
