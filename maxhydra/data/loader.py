"""Batches made ahead of the step in a thread of their own, and the position to go on from."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Generic, TypeVar

import jax

from maxhydra.config.schema.data import Data
from maxhydra.data.batch import Assemble, Batch, BatchSpec, make_batch, own_rows
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Row
from maxhydra.data.sharded_streams import StreamSet, gather
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.stream import ReadStats, RowStream, State, Stream

B = TypeVar("B")


@dataclasses.dataclass(frozen=True)
class _PreparedBatch(Generic[B]):
    """A batch, and where the data stands after it."""

    batch: B
    sequences: int
    states: list[State | None]
    counts: ReadStats


class Loader(Generic[B]):
    """Batches without end. Its position counts the sequences handed out, whatever the number of processes."""

    def __init__(
        self,
        open_streams: Callable[[int], StreamSet],
        assemble: Callable[[list[Row], int], B],
        *,
        size: Callable[[int], int],
        streams: int,
        prefetch: int,
        close: Callable[[], None],
    ):
        """`make_feed` opens so many streams; `assemble` makes a batch of own rows; `size` is that of the next batch."""
        self._open_streams, self._assemble, self._size = open_streams, assemble, size
        self._feed = open_streams(streams)
        self._prefetch, self._close = prefetch, close
        self._given: _PreparedBatch[B] | None = None
        self._sequences, self._states = 0, [None] * streams  # type: tuple[int, list[State | None]]
        self._ahead: deque[Future[_PreparedBatch[B]]] = deque()
        self._planned = 0
        # One worker, so that batches are made in order and reading does not crowd out the step.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        self._read_ahead()
        try:
            made = self._ahead.popleft().result()
        except BaseException:
            self._go_to(self._sequences, self._states)
            raise
        self._given = made
        self._sequences, self._states = made.sequences, made.states
        return made.batch

    def peek(self) -> B:
        """The next batch, which stays the next."""
        self._read_ahead()
        return self._ahead[0].result().batch

    def _read_ahead(self) -> None:
        while len(self._ahead) <= self._prefetch:
            size = self._size(self._planned)
            self._planned += size
            self._ahead.append(self._worker.submit(self._make, size, self._planned - size))

    def _make(self, size: int, sequences: int) -> _PreparedBatch[B]:
        batch = self._assemble(self._feed.rows(size, sequences), size)
        return _PreparedBatch(batch, sequences + size, self._feed.states(), self._feed.counts)

    def state(self) -> dict[str, Any]:
        """The position after the last batch handed out; those made ahead do not count. All processes ask at once."""
        shared = len(self._states) > 1 and jax.process_count() > 1
        return {"sequences": self._sequences, "streams": gather(self._states) if shared else self._states}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from a state, of this loader or of another over the same data."""
        self._go_to(int(state["sequences"]), list(state["streams"]))

    def _go_to(self, sequences: int, states: list[State | None]) -> None:
        """Drop the batches made ahead, and stand where some states say."""
        while self._ahead:
            self._ahead.pop().cancel()

        def move() -> None:
            if len(states) != self._feed.count:
                self._feed.close()
                self._feed = self._open_streams(len(states))
            self._feed.restore(states)

        self._worker.submit(move).result()
        self._sequences, self._states, self._planned = sequences, states, sequences

    def metrics(self) -> dict[str, float]:
        """How the batches handed out so far were filled, in this process and session."""
        counts = self._given.counts if self._given else ReadStats()
        padding = 1 - counts.filled / counts.places if counts.places else 0.0
        return {
            "data/padding": padding,
            "data/epoch": counts.epoch,
            "data/skipped": float(counts.skipped),
            "data/dropped": float(counts.dropped),
        }

    def close(self) -> None:
        """End the threads; the loader cannot be used after."""
        while self._ahead:
            self._ahead.pop().cancel()
        self._worker.submit(self._feed.close).result()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._close()


def train_loader(data: Data, spec: BatchSpec) -> Loader[Batch]:
    """Batches to train on, in a new order each epoch, as global arrays."""
    return open_loader(data, spec, make_batch)


def host_loader(data: Data, spec: BatchSpec) -> Loader[list[Row]]:
    """The own rows of each training batch, on the host: for prompts, whose answers are no arrays."""
    return open_loader(data, spec, own_rows)


def open_loader(data: Data, spec: BatchSpec, assemble: Assemble[B]) -> Loader[B]:
    """What `assemble` makes of the own rows of each training batch."""
    pipeline = Pipeline(data, spec.rows)
    pipeline.check_enough(spec.batch)
    own = lru_cache(spec.own_rows)
    overfit = pipeline.first_rows(data.overfit_batches * spec.batch) if data.overfit_batches else None

    def open_streams(streams: int) -> StreamSet:
        def open_stream(share: int) -> Stream:
            if overfit is not None:
                order = ShuffleOrder(len(overfit), spec.rows.seed, data.shuffle)
                return RowStream(overfit, order, share=share, shares=streams, epochs=None)
            return pipeline.stream(share=share, shares_in_all=streams)

        return StreamSet(open_stream, streams=streams, own=own)

    by_index = pipeline.has_rows or overfit is not None
    return Loader(
        open_streams,
        lambda rows, size: assemble(rows, spec, size),
        size=spec.batch_at,
        streams=data.streams or (1 if by_index else jax.process_count()),
        prefetch=data.prefetch,
        close=pipeline.close,
    )
