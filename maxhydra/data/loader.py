"""Data loaders: training batches prepared ahead in a background thread, and one pass of evaluation batches.

Stream s of S fills rows s * B / S to (s + 1) * B / S of a batch of B, so batch k is the same on any number of
processes, and a process reads only the streams whose rows its devices hold. The states of all streams form the data
position: on a different number of hosts the streams are redistributed, and no record is lost or read twice.
"""

import dataclasses
import json
from collections import deque
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.data.batch import Assemble, Batch, BatchSpec, local_rows, make_batch
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Row
from maxhydra.data.shuffle import ShuffleOrder
from maxhydra.data.stream import ReadStats, RowStream, State, Stream
from maxhydra.runtime import signals


class StreamSet:
    """The streams that this process reads, opened on demand; it yields this process's rows of each batch."""

    def __init__(self, open_stream: Callable[[int], Stream], *, streams: int, local_rows: Callable[[int], np.ndarray]):
        """`local_rows` maps a batch size to the rows of such a batch that this process needs."""
        self._open, self._count, self._local_rows = open_stream, streams, local_rows
        self._streams: dict[int, Stream] = {}
        self._states: list[State | None] = [None] * streams
        self._is_started = False

    @property
    def count(self) -> int:
        return self._count

    def rows(self, size: int, sequences: int) -> list[Row]:
        """Read this process's rows of the batch of `size` that starts after `sequences` sequences."""
        local_rows = self._local_rows(size)
        if size >= self._count:
            stream_of_row = np.arange(size) * self._count // size
            needed = np.unique(stream_of_row[local_rows])
        else:
            # Fewer rows than streams: the streams take turns, and every process tracks all of them.
            stream_of_row = (sequences + np.arange(size)) % self._count
            needed = np.arange(self._count)
        self._open_only(needed.tolist())
        is_local = set(local_rows.tolist())
        taken: dict[int, Row] = {}
        for row, index in enumerate(stream_of_row.tolist()):
            if row in is_local:
                taken[row] = self._streams[index].take()
            elif index in self._streams:
                self._streams[index].skip()
        return [taken[row] for row in sorted(taken)]

    def _open_only(self, needed: list[int]) -> None:
        """Open the streams that are needed from now on, and close the others."""
        for index in set(self._streams) - set(needed):
            self._streams.pop(index).close()
        for index in needed:
            if index in self._streams:
                continue
            if self._is_started:
                reason = f"a larger batch would move streams between processes ({len(needed)} are needed here)"
                hint = "set data.streams to a multiple of the number of processes"
                raise ConfigError(Problem("data.streams", reason, value=self._count, hint=hint))
            stream = self._streams[index] = self._open(index)
            if (state := self._states[index]) is not None:
                _restore(stream, state)
        self._is_started = True

    def states(self) -> list[State | None]:
        """States of this process's streams, by number; None for those that other processes read."""
        return [self._streams[index].state() if index in self._streams else None for index in range(self._count)]

    def restore(self, states: list[State | None]) -> None:
        """Restart every stream from its state; None is the beginning."""
        self.close()
        self._streams, self._is_started = {}, False
        self._states = list(states)

    @property
    def stats(self) -> ReadStats:
        return sum((stream.stats for stream in self._streams.values()), ReadStats())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _restore(stream: Stream, state: State) -> None:
    try:
        stream.restore(state)
    except (KeyError, TypeError):
        reason = "does not match the data position of the checkpoint"
        hint = (
            "resume with the data that the run started with, or load only the weights with checkpoint.load_parameters"
        )
        raise ConfigError(Problem("data", reason, hint=hint)) from None


def gather(states: list[State | None]) -> list[State | None]:
    """All-gather the states of all streams. A collective: every process must call it at the same time."""
    serialized = np.frombuffer(json.dumps(states).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.array([len(serialized)])))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(serialized)] = serialized
    gathered = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    merged: list[State | None] = [None] * len(states)
    for size, text in zip(sizes, gathered, strict=True):
        for index, state in enumerate(json.loads(text[:size].tobytes())):
            merged[index] = merged[index] or state
    return merged


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


def eval_batches(data: Data, spec: BatchSpec) -> Iterator[Batch]:
    """Iterate once over the held-out rows in order, as global arrays; the last batch is padded with rows of weight 0.

    With data.overfit_batches, iterate over the training batches instead: a model that cannot fit those has a bug.
    """
    return held_out(data, spec, make_batch)


def held_out(data: Data, spec: BatchSpec, assemble: Assemble[B]) -> Iterator[B]:
    """Iterate over the held-out batches, each assembled from this process's rows by `assemble`."""
    pipeline = Pipeline(data, spec.rows)
    rows = _rows(pipeline, spec)
    pending: deque[Future[B | None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as worker:
        try:
            while True:
                while len(pending) <= data.prefetch:
                    pending.append(worker.submit(_next_batch, rows, spec, assemble))
                if (batch := pending.popleft().result()) is None:
                    return
                yield batch
        finally:
            while pending:
                pending.pop().cancel()
            worker.submit(rows.close).result()
            pipeline.close()


def _rows(pipeline: Pipeline, spec: BatchSpec) -> Generator[Row, None, None]:
    """Iterate over all held-out rows.

    Every process reads all of them: they are few, and batches are then identical on any number of hosts.
    """
    if pipeline.data.overfit_batches is not None:
        first = pipeline.first_rows(pipeline.data.overfit_batches * spec.batch)
        yield from (first[i] for i in range(len(first)))
        return
    for stream in pipeline.held_out():
        try:
            while True:
                try:
                    row = stream.take()
                except StopIteration:
                    break
                yield row
        finally:
            stream.close()


def _next_batch(rows: Iterator[Row], spec: BatchSpec, assemble: Assemble[B]) -> B | None:
    """Assemble the next batch from this process's rows; None after the last."""
    taken = list(islice(rows, spec.batch))
    if not taken:
        return None
    padding = {name: np.zeros_like(column) for name, column in taken[0].items()}
    local = [taken[i] if i < len(taken) else padding for i in spec.local_rows(spec.batch).tolist()]
    return assemble(local, spec, spec.batch)
