"""The rows of each batch, read from streams that are distributed over the processes of a run.

Stream s of S fills rows s * B / S to (s + 1) * B / S of a batch of B, so batch k is the same on any number of
processes, and a process reads only the streams whose rows its devices hold. The states of all streams form the data
position: on a different number of hosts the streams are redistributed, and no record is lost or read twice.
"""

import json
from collections.abc import Callable

import numpy as np
from jax.experimental import multihost_utils

from maxhydra.config import ConfigError, Problem
from maxhydra.data.rows import Row
from maxhydra.data.stream import ReadStats, State, Stream


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
