"""The engine's inbox: requests, cancellations, new weights and the request to close, passed on by other threads.

The engine's thread takes all of it between two iterations. With several processes, all engines must dispatch the same
programs in the same order: process 0 has the clients, decides what enters each iteration, and sends it to the others.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import NamedTuple, TypeVar

from maxhydra.data.audio.tokens import Clips
from maxhydra.decode.request import Request, RequestRejectedError
from maxhydra.decode.sequence import Sequence
from maxhydra.runtime.channel import Channel, ChannelClosedError, is_main

T = TypeVar("T")
Updates = Iterable[Callable[[], None]]
REQUEST_FIELDS = tuple(field.name for field in dataclasses.fields(Request))
# Bytes of the images and audio of a request that are sent to other processes.
MAX_SHARED_BYTES = 2**29


class Turn(NamedTuple):
    """What enters one iteration."""

    sequences: list[Sequence]
    cancelled: frozenset[int]
    """Numbers of sequences."""
    updates: Updates
    """Changes of the weights, to apply before the next iteration."""
    is_last: bool
    """Whether the engine closes instead."""


class Inbox:
    """Thread-safe. `make_sequence` makes the sequence of a request that process 0 has checked."""

    def __init__(self, make_sequence: Callable[[Request], Sequence]):
        self._make_sequence = make_sequence
        self._channel = Channel()
        self._numbers = itertools.count()
        self._changed, self._barrier_lock = threading.Condition(), threading.Lock()
        self._submitted: list[Sequence] = []
        self._updates: Updates = ()
        self._has_barrier = self._is_closing = False
        self._end_reason: str | None = None
        """Why the engine accepts no more requests; None while it runs."""

    @property
    def num_submitted(self) -> int:
        return len(self._submitted)

    @property
    def is_shared(self) -> bool:
        """Whether other processes take the same turns."""
        return self._channel.is_shared

    def find_problem(self, request: Request) -> str | None:
        """Return why a request cannot be sent to the other processes; None if it can, or if there are none."""
        images = 0 if request.images is None else request.images.nbytes
        size = images + (0 if request.audio is None else request.audio.frames.nbytes)
        if not self.is_shared or size <= MAX_SHARED_BYTES:
            return None
        return (
            f"images and audio have {size} bytes, more than the {MAX_SHARED_BYTES} that are sent to other processes: "
            "use fewer or smaller ones, or one process"
        )

    def submit(self, sequences: list[Sequence]) -> None:
        """Queue sequences for the next turn; RequestRejectedError if the engine has ended."""
        with self._changed:
            self._reject_if_ended()
            self._submitted += sequences
            self._changed.notify_all()

    def barrier(self, updates: Updates = ()) -> None:
        """Wait until the engine's thread takes a turn, the same one in all processes, and applies these updates.

        A collective call. Afterwards every process has dispatched all steps of sequences that finished before.
        """
        with self._barrier_lock, self._changed:
            self._reject_if_ended()
            self._updates, self._has_barrier = updates, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._has_barrier or self._end_reason is not None)
            self._reject_if_ended()

    def call(self, function: Callable[[], T]) -> T:
        """The result of a function that the engine's thread calls between two iterations; with one process only."""
        assert not self.is_shared
        result = Future[T]()

        def run() -> None:
            try:
                result.set_result(function())
            except Exception as error:
                result.set_exception(error)

        self.barrier([run])
        return result.result()

    def close(self) -> None:
        """Make the next turn the last one."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        if not is_main():
            self._channel.close()

    def end(self, reason: str) -> list[Sequence]:
        """Accept no more requests, and return those that no turn has taken."""
        with self._changed:
            self._end_reason = reason
            self._changed.notify_all()
            remaining, self._submitted = self._submitted, []
        self._channel.close()
        return remaining

    def take(self, *, is_busy: bool, admitted: Callable[[], Iterable[Sequence]]) -> Turn:
        """The next turn; waits for one unless `is_busy`. `admitted`: sequences that may have been cancelled."""
        return self._decide(is_busy, admitted) if is_main() else self._receive()

    def _decide(self, is_busy: bool, admitted: Callable[[], Iterable[Sequence]]) -> Turn:
        with self._changed:
            self._changed.wait_for(lambda: is_busy or self._submitted or self._has_barrier or self._is_closing)
            sequences, self._submitted = self._submitted, []
            has_barrier, is_last = self._has_barrier, self._is_closing
            updates = self._pass_barrier() if has_barrier else ()
        for sequence in sequences:
            sequence.number = next(self._numbers)
        # Read once: a handle may be cancelled at any time, but only the numbers that are sent take effect.
        cancelled = [each.number for part in (admitted(), sequences) for each in part if each.handle.is_cancelled]
        if self.is_shared:
            requests = [[getattr(each.request, name) for name in REQUEST_FIELDS] for each in sequences]
            self._channel.share([requests, cancelled, has_barrier, is_last])
        return Turn(sequences, frozenset(cancelled), updates, is_last)

    def _receive(self) -> Turn:
        try:
            requests, cancelled, has_barrier, is_last = self._channel.share()
        except ChannelClosedError:
            if not self._is_closing:
                raise
            return Turn([], frozenset(), (), is_last=True)
        sequences = []
        for values in requests:
            named = dict(zip(REQUEST_FIELDS, values, strict=True))
            named["logit_bias"] = tuple((token, value) for token, value in named["logit_bias"])
            named["audio"] = None if named["audio"] is None else Clips(*named["audio"])
            request = Request(**{**named, "prompt": tuple(named["prompt"]), "stop": tuple(named["stop"])})
            sequences.append(self._make_sequence(request))
            sequences[-1].number = next(self._numbers)
        updates: Updates = ()
        if has_barrier:
            with self._changed:
                self._changed.wait_for(lambda: self._has_barrier or self._is_closing)
                updates = self._pass_barrier()
        return Turn(sequences, frozenset(cancelled), updates, is_last)

    def _pass_barrier(self) -> Updates:
        updates, self._updates, self._has_barrier = self._updates, (), False
        self._changed.notify_all()
        return updates

    def _reject_if_ended(self) -> None:
        if self._end_reason is not None:
            raise RequestRejectedError(self._end_reason)
