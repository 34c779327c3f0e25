"""Chunks: a few records at a time, read and tokenized ahead of need, in threads or in processes."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from typing import Any, Protocol

from maxhydra.data.records import BadRecord, Cursor, Record, RecordStream
from maxhydra.data.shuffle import ShuffleOrder, share_of

# Records in a chunk: enough for a tokenizer to spread over its threads, few enough to begin soon.
SIZE = 128


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Some records of one epoch. `payload` is what a worker needs to get them: indices, or numbered records."""

    cursor: Cursor
    """From where this chunk is read."""
    after: Cursor
    """From where the next is."""
    payload: Any
    ends_epoch: bool

    @property
    def epoch(self) -> int:
        return int(self.cursor["epoch"])


class Chunks(Protocol):
    """The chunks of one share of a source."""

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        """From a cursor, or from the start, on; `epochs` in all, or without end."""
        ...


@dataclasses.dataclass(frozen=True)
class IndexedChunks:
    """Chunks of records by index, in the order of each epoch."""

    order: ShuffleOrder
    share: int
    shares: int

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        first, last = share_of(self.order.length, self.share, self.shares)
        epoch, at = (int(cursor["epoch"]), int(cursor["at"])) if cursor else (0, 0)
        while epochs is None or epoch < epochs:
            start = first + at
            stop = min(start + SIZE, last)
            here = {"epoch": epoch, "at": at}
            indices = self.order.indices(epoch, start, stop)
            epoch, at = (epoch, stop - first) if stop < last else (epoch + 1, 0)
            yield Chunk(here, {"epoch": epoch, "at": at}, indices, ends_epoch=stop == last)


@dataclasses.dataclass(frozen=True)
class StreamedChunks:
    """Chunks of a stream of records."""

    stream: RecordStream
    share: int
    shares: int

    def iter_from(self, cursor: Cursor | None, epochs: int | None) -> Iterator[Chunk]:
        here: Cursor = cursor or {"epoch": 0, "at": None}
        while epochs is None or here["epoch"] < epochs:
            epoch = int(here["epoch"])
            at: Cursor | None = here["at"]
            gathered: list[tuple[int, Record | BadRecord]] = []
            for record, behind in self.stream.iter_from(at, share=self.share, shares=self.shares):
                if len(gathered) == SIZE:
                    after = {"epoch": epoch, "at": at}
                    yield Chunk(here, after, gathered, ends_epoch=False)
                    here, gathered = after, []
                at = behind
                gathered.append((int(at["number"]), record))
            after = {"epoch": epoch + 1, "at": None}
            yield Chunk(here, after, gathered, ends_epoch=True)
            here = after


def ahead(
    chunks: Iterator[Chunk], work: Callable[[Any], Any], pool: Executor, *, depth: int
) -> Iterator[tuple[Chunk, Any]]:
    """Each chunk with what `work` makes of its payload, in order, `depth` of them under way at a time."""
    pending: deque[tuple[Chunk, Future]] = deque()
    try:
        for chunk in chunks:
            pending.append((chunk, pool.submit(work, chunk.payload)))
            if len(pending) > depth:
                done, future = pending.popleft()
                yield done, future.result()
        while pending:
            done, future = pending.popleft()
            yield done, future.result()
    finally:
        for _, future in pending:
            future.cancel()
