"""Evaluation batches: one pass over the held-out rows, in order, with exact counts."""

from collections import deque
from collections.abc import Generator, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

import numpy as np

from maxhydra.config.schema.data import Data
from maxhydra.data.batch import Assemble, Batch, BatchSpec, make_batch
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.rows import Row

B = TypeVar("B")


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
