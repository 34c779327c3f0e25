"""The training data loader: batches prepared ahead of the step in a background thread, with a resumable position."""

import dataclasses
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Generic, TypeVar

import jax

from maxhydra.config.schema.data import Data
from maxhydra.data.batch import Assemble, Batch, BatchSpec, local_rows, make_batch
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Row
from maxhydra.data.sharded_streams import StreamSet, gather
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.stream import ReadStats, RowStream, State, Stream
from maxhydra.runtime import signals

B = TypeVar("B")


@dataclasses.dataclass(frozen=True)
class _PreparedBatch(Generic[B]):
    """A batch, and the data position after it."""

    batch: B
    sequences: int
    states: list[State | None]
    stats: ReadStats


class Loader(Generic[B]):
    """Endless iterator over batches. Its position counts returned sequences, on any number of processes."""

    def __init__(
        self,
        open_streams: Callable[[int], StreamSet],
        assemble: Callable[[list[Row], int], B],
        *,
        batch_size: Callable[[int], int],
        streams: int,
        prefetch: int,
        close: Callable[[], None],
    ):
        """`open_streams` opens n streams, `assemble` builds a batch from the local rows and the batch size.

        `batch_size` is the size of the batch that starts after n sequences.
        """
        self._open_streams, self._assemble, self._batch_size = open_streams, assemble, batch_size
        self._streams = open_streams(streams)
        self._prefetch, self._close = prefetch, close
        self._stats = ReadStats()
        self._sequences, self._states = 0, [None] * streams  # type: tuple[int, list[State | None]]
        self._pending: deque[Future[_PreparedBatch[B]]] = deque()
        self._scheduled_sequences = 0
        # One worker, so that batches are prepared in order and reading does not compete with the step for cores.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[B]:
        return self

    def __next__(self) -> B:
        self._schedule()
        try:
            prepared = signals.wait(self._pending.popleft())
        except Exception:
            self._seek(self._sequences, self._states)
            raise
        self._stats = prepared.stats
        self._sequences, self._states = prepared.sequences, prepared.states
        return prepared.batch

    def peek(self) -> B:
        """Return the next batch without consuming it."""
        self._schedule()
        return self._pending[0].result().batch

    def _schedule(self) -> None:
        """Submit batches to the worker until `prefetch` are prepared in addition to the next one."""
        while len(self._pending) <= self._prefetch:
            start = self._scheduled_sequences
            size = self._batch_size(start)
            self._scheduled_sequences += size
            self._pending.append(self._worker.submit(self._prepare, size, start))

    def _prepare(self, size: int, sequences: int) -> _PreparedBatch[B]:
        batch = self._assemble(self._streams.rows(size, sequences), size)
        return _PreparedBatch(batch, sequences + size, self._streams.states(), self._streams.stats)

    def state(self) -> dict[str, Any]:
        """Position after the last returned batch, ignoring prefetched ones. A collective: all processes call it."""
        is_distributed = len(self._states) > 1 and jax.process_count() > 1
        return {"sequences": self._sequences, "streams": gather(self._states) if is_distributed else self._states}

    def restore(self, state: dict[str, Any]) -> None:
        """Resume from a state of this loader or of another one over the same data."""
        self._seek(int(state["sequences"]), list(state["streams"]))

    def _seek(self, sequences: int, states: list[State | None]) -> None:
        """Drop prefetched batches and move all streams to the given states."""
        while self._pending:
            self._pending.pop().cancel()

        def move() -> None:
            if len(states) != self._streams.count:
                self._streams.close()
                self._streams = self._open_streams(len(states))
            self._streams.restore(states)

        self._worker.submit(move).result()
        self._sequences, self._states, self._scheduled_sequences = sequences, states, sequences

    def metrics(self) -> dict[str, float]:
        """Padding, epoch, skipped and dropped counts of the batches returned so far by this process and session."""
        stats = self._stats
        padding = 1 - stats.filled / stats.capacity if stats.capacity else 0.0
        return {
            "data/padding": padding,
            "data/epoch": stats.epoch,
            "data/skipped": float(stats.skipped),
            "data/dropped": float(stats.dropped),
        }

    def close(self) -> None:
        """Stop the threads; the loader cannot be used afterwards."""
        while self._pending:
            self._pending.pop().cancel()
        self._worker.submit(self._streams.close).result()
        self._worker.shutdown(wait=True, cancel_futures=True)
        self._close()


def train_loader(data: Data, spec: BatchSpec) -> Loader[Batch]:
    """Open a loader of training batches as global arrays, in a new order each epoch."""
    return open_loader(data, spec, make_batch)


def host_loader(data: Data, spec: BatchSpec) -> Loader[list[Row]]:
    """Open a loader of this process's rows of each training batch, on the host: for prompts, which hold objects."""
    return open_loader(data, spec, local_rows)


def open_loader(data: Data, spec: BatchSpec, assemble: Assemble[B]) -> Loader[B]:
    """Open a loader of training batches that `assemble` builds from this process's rows."""
    pipeline = Pipeline(data, spec.rows)
    pipeline.check_enough(spec.batch)
    local_rows = lru_cache(spec.local_rows)
    overfit = pipeline.first_rows(data.overfit_batches * spec.batch) if data.overfit_batches else None

    def open_streams(streams: int) -> StreamSet:
        def open_stream(share: int) -> Stream:
            if overfit is not None:
                order = ShuffleOrder(len(overfit), spec.rows.seed, data.shuffle)
                return RowStream(overfit, order, share=share, shares=streams, epochs=None)
            return pipeline.stream(share=share, num_shares=streams)

        return StreamSet(open_stream, streams=streams, local_rows=local_rows)

    has_random_access = pipeline.has_rows or overfit is not None
    return Loader(
        open_streams,
        lambda rows, size: assemble(rows, spec, size),
        batch_size=spec.batch_at,
        streams=data.streams or (1 if has_random_access else jax.process_count()),
        prefetch=data.prefetch,
        close=pipeline.close,
    )
