"""Transfers the deltas of sequences from the engine's thread to the event loop."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable

from maxhydra.decode.request import Delta, Handle


class Mailbox:
    """Transfers deltas from the engine's thread to the event loop; one wake-up for all deltas of a decode step."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deltas: deque[tuple[DeltaQueue, int, Delta]] = deque()
        self._is_scheduled = False

    def open(self) -> None:
        """Called in the event loop, before the first delta."""
        self._loop = asyncio.get_running_loop()

    def post(self, queue: "DeltaQueue", index: int, delta: Delta) -> None:
        """Called in the engine's thread."""
        assert self._loop is not None
        self._deltas.append((queue, index, delta))
        if not self._is_scheduled:
            self._is_scheduled = True
            # The event loop is closed at shutdown, when no client is left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: deltas that are posted from now on schedule another delivery.
        self._is_scheduled = False
        while self._deltas:
            queue, index, delta = self._deltas.popleft()
            queue.put(index, delta)


class DeltaQueue:
    """The deltas of all sequences of one request, in the event loop."""

    def __init__(self, mailbox: Mailbox, on_finish: Callable[[Delta], None]):
        self.handles: list[Handle] = []
        self.num_unfinished = 0
        """Sequences whose last delta was not taken yet."""
        self.change_first: Callable[[int, Delta], Delta] | None = None
        """Replaces the first delta of each sequence, given its index."""
        self._started: set[int] = set()
        self._mailbox, self._on_finish = mailbox, on_finish
        mailbox.open()
        self._deltas: list[tuple[int, Delta]] = []
        self._arrival: asyncio.Future[None] | None = None

    def add(self, handle: Handle) -> None:
        index = len(self.handles)
        self.handles.append(handle)
        self.num_unfinished += 1
        handle.listen(lambda delta: self._mailbox.post(self, index, delta))

    def put(self, index: int, delta: Delta) -> None:
        self._deltas.append((index, delta))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if delta.finish is not None:
            self._on_finish(delta)

    async def take(self) -> list[tuple[int, Delta]]:
        """Wait for at least one delta, and return all that have arrived."""
        if not self._deltas:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        deltas, self._deltas = self._deltas, []
        self.num_unfinished -= sum(delta.finish is not None for _, delta in deltas)
        return [(index, self._change(index, delta)) for index, delta in deltas] if self.change_first else deltas

    def _change(self, index: int, delta: Delta) -> Delta:
        is_first = index not in self._started
        self._started.add(index)
        return self.change_first(index, delta) if is_first and self.change_first and not delta.error else delta

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()
