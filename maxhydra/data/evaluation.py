"""Held-out batches: once through, in order, counted exactly."""

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
    """The held-out rows once, in order, as global arrays; the last batch is filled up with rows of weight 0.

    With data.overfit_batches, the batches trained on: a model that cannot fit those has a bug.
    """
    return held_out(data, spec, make_batch)


def held_out(data: Data, spec: BatchSpec, assemble: Assemble[B]) -> Iterator[B]:
    """What `assemble` makes of the own rows of each held-out batch."""
    pipeline = Pipeline(data, spec.rows)
    rows = _rows(pipeline, spec)
    ahead: deque[Future[B | None]] = deque()
    with ThreadPoolExecutor(1, thread_name_prefix="data") as worker:
        try:
            while True:
                while len(ahead) <= data.prefetch:
                    ahead.append(worker.submit(_next, rows, spec, assemble))
                if (batch := ahead.popleft().result()) is None:
                    return
                yield batch
        finally:
            while ahead:
                ahead.pop().cancel()
            worker.submit(rows.close).result()
            pipeline.close()


def _rows(pipeline: Pipeline, spec: BatchSpec) -> Generator[Row, None, None]:
    """Every process reads all of them: they are few, and the batches are then the same on any number of hosts."""
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


def _next(rows: Iterator[Row], spec: BatchSpec, assemble: Assemble[B]) -> B | None:
    """The next batch, of which this process keeps its own rows; None after the last."""
    taken = list(islice(rows, spec.batch))
    if not taken:
        return None
    empty = {name: np.zeros_like(column) for name, column in taken[0].items()}
    own = [taken[i] if i < len(taken) else empty for i in spec.own_rows(spec.batch).tolist()]
    return assemble(own, spec, spec.batch)
