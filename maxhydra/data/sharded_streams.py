"""The rows of each batch, from streams that any number of processes can share.

Stream s of S fills rows s * B / S to (s + 1) * B / S of a batch of B, so batch k is the same whatever the number of
processes, and a process runs only the streams whose rows its devices hold. The state of all streams is the data's
position: on another number of hosts, streams find new homes, and no record is lost or read twice.
"""

import json
from collections.abc import Callable

import numpy as np
from jax.experimental import multihost_utils

from maxhydra.config import ConfigError, Problem
from maxhydra.data.rows import Row
from maxhydra.data.stream import ReadStats, State, Stream


class StreamSet:
    """The streams that this process runs."""

    def __init__(self, open_stream: Callable[[int], Stream], *, streams: int, own: Callable[[int], np.ndarray]):
        """`own` gives the rows of a batch of some size that this process needs."""
        self._open, self._count, self._own = open_stream, streams, own
        self._streams: dict[int, Stream] = {}
        self._states: list[State | None] = [None] * streams
        self._begun = False

    @property
    def count(self) -> int:
        return self._count

    def rows(self, size: int, sequences: int) -> list[Row]:
        """The own rows of the batch that begins after so many sequences."""
        own = self._own(size)
        if size >= self._count:
            source = np.arange(size) * self._count // size
            needed = np.unique(source[own])
        else:
            # Fewer rows than streams: they take turns, and every process follows them all.
            source = (sequences + np.arange(size)) % self._count
            needed = np.arange(self._count)
        self._run(needed.tolist())
        wanted = set(own.tolist())
        taken: dict[int, Row] = {}
        for row, index in enumerate(source.tolist()):
            if row in wanted:
                taken[row] = self._streams[index].take()
            elif index in self._streams:
                self._streams[index].skip()
        return [taken[row] for row in sorted(taken)]

    def _run(self, needed: list[int]) -> None:
        """Open the streams that are needed from here on, and close those that are not."""
        for index in set(self._streams) - set(needed):
            self._streams.pop(index).close()
        for index in needed:
            if index in self._streams:
                continue
            if self._begun:
                reason = f"streams do not stay with their processes as the batch grows to {len(needed)} of them here"
                hint = "set data.streams to a multiple of the number of processes"
                raise ConfigError(Problem("data.streams", reason, value=self._count, hint=hint))
            stream = self._streams[index] = self._open(index)
            if (state := self._states[index]) is not None:
                _restore(stream, state)
        self._begun = True

    def states(self) -> list[State | None]:
        """The states of this process's streams, by number; None for those that other processes run."""
        return [self._streams[index].state() if index in self._streams else None for index in range(self._count)]

    def restore(self, states: list[State | None]) -> None:
        """Begin anew from some states; None is the start."""
        self.close()
        self._streams, self._begun = {}, False
        self._states = list(states)

    @property
    def counts(self) -> ReadStats:
        return sum((stream.counts for stream in self._streams.values()), ReadStats())

    def close(self) -> None:
        for stream in self._streams.values():
            stream.close()


def _restore(stream: Stream, state: State) -> None:
    try:
        stream.restore(state)
    except (KeyError, TypeError):
        reason = "is other data than that of the position to go on from, which has no place in it"
        hint = "give the data that the run began with; checkpoint.load_parameters takes the weights alone"
        raise ConfigError(Problem("data", reason, hint=hint)) from None


def gather(states: list[State | None]) -> list[State | None]:
    """Every stream's state, from whichever process runs it. All processes call it at the same time."""
    mine = np.frombuffer(json.dumps(states).encode(), np.uint8)
    sizes = np.ravel(multihost_utils.process_allgather(np.array([len(mine)])))
    padded = np.zeros(int(sizes.max()), np.uint8)
    padded[: len(mine)] = mine
    gathered = multihost_utils.process_allgather(padded).reshape(len(sizes), -1)
    merged: list[State | None] = [None] * len(states)
    for size, text in zip(sizes, gathered, strict=True):
        for index, state in enumerate(json.loads(text[:size].tobytes())):
            merged[index] = merged[index] or state
    return merged
