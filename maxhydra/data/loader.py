"""The order of training, and batches made ahead of the step in a thread of their own."""

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import grain
import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.data import Data
from maxhydra.data.batch import Batch, BatchSpec, make_batch
from maxhydra.data.rows import Row, Rows, make_row
from maxhydra.data.sources import open_source


class Loader:
    """Batches without end. Its position counts the sequences handed out, whatever the number of processes."""

    def __init__(self, make: Callable[[int], Batch], *, batch: int, prefetch: int):
        """`make` gives the batch that starts at a position."""
        self._make = make
        self._batch = batch
        self._prefetch = prefetch
        self._position = 0
        self._ahead: deque[Future[Batch]] = deque()
        # One worker, so that batches are made in order and reading does not crowd out the step.
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="data")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        batch = self._take()
        self._position += self._batch
        return batch

    def peek(self) -> Batch:
        """The next batch, which stays the next."""
        self._read_ahead()
        return self._ahead[0].result()

    def _read_ahead(self) -> None:
        while len(self._ahead) <= self._prefetch:
            start = self._position + len(self._ahead) * self._batch
            self._ahead.append(self._worker.submit(self._make, start))

    def _take(self) -> Batch:
        """The batch at the position, with `prefetch` more under way when it is handed out."""
        self._read_ahead()
        try:
            return self._ahead.popleft().result()
        except BaseException:
            self._forget()
            raise

    def _forget(self) -> None:
        """Drop the batches made ahead."""
        while self._ahead:
            self._ahead.pop().cancel()

    def state(self) -> dict[str, int]:
        """The position after the last batch handed out; those made ahead do not count."""
        return {"sequences": self._position}

    def restore(self, state: dict[str, int]) -> None:
        """Go on from a state, of this loader or of another over the same data."""
        self._forget()
        self._position = int(state["sequences"])

    def close(self) -> None:
        """End the thread; the loader cannot be used after."""
        self._forget()
        self._worker.shutdown(wait=True, cancel_futures=True)


def train_loader(data: Data, spec: BatchSpec) -> Loader:
    """Rows in a new order each epoch; sequence n of the run is the same whatever the mesh, processes and batch size."""
    rows = _training_rows(data, spec)
    order = grain.MapDataset.source(rows).seed(spec.seed % 2**32)
    order = order[: data.overfit_batches * spec.batch] if data.overfit_batches is not None else order
    order = (order.shuffle() if data.shuffle else order).repeat()
    return Loader(lambda start: make_batch(lambda i: order[start + i], spec), batch=spec.batch, prefetch=data.prefetch)


def eval_batches(data: Data, spec: BatchSpec) -> Iterator[Batch]:
    """The held-out rows once, in order; the last batch is filled up with rows of weight 0.

    With data.overfit_batches, the batches trained on: a model that cannot fit those has a bug.
    """
    if data.overfit_batches is not None:
        rows, count = _training_rows(data, spec), data.overfit_batches * spec.batch
    else:
        rows = open_source(data, spec).evaluation
        count = len(rows)
    empty = make_row(np.zeros(1, np.int32), spec.seq_len)

    def row(index: int) -> Row:
        return rows[index] if index < count else empty

    loader = Loader(lambda start: make_batch(lambda i: row(start + i), spec), batch=spec.batch, prefetch=data.prefetch)
    try:
        yield from itertools.islice(loader, -(-count // spec.batch))
    finally:
        loader.close()


def _training_rows(data: Data, spec: BatchSpec) -> Rows:
    """The rows of a source to train on; fewer than are asked for is an error."""
    rows = open_source(data, spec).train
    there_are = f"data.source={data.source} holds {len(rows)} sequences of train.seq_len={spec.seq_len} to train on"
    if len(rows) < spec.batch:
        reason = f"{there_are}, and a batch takes {spec.batch}"
        hint = "give it more text, or set train.seq_len, train.per_device_batch_size or data.eval_fraction lower"
        raise ConfigError(Problem("data", reason, hint=hint))
    most = len(rows) // spec.batch
    if data.overfit_batches is not None and data.overfit_batches > most:
        raise ConfigError(
            Problem("data.overfit_batches", there_are, value=data.overfit_batches, accepted=f"1 to {most}")
        )
    return rows
