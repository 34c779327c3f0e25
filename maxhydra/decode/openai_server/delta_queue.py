"""The deltas of the sequences of one HTTP request, in the event loop."""

import asyncio
from collections.abc import Callable, Sequence

from maxhydra.data import Tokenizer
from maxhydra.decode.detokenize import DeltaDetokenizer
from maxhydra.decode.request import Delta, Request


class DeltaQueue:
    """Deltas from their arrival until they are taken, when they get their text."""

    def __init__(self, requests: Sequence[Request], tokenizer: Tokenizer, on_finish: Callable[[Delta], None]):
        """`on_finish`: called with the last delta of each sequence, unless the queue was discarded."""
        self.size = self.num_unfinished = len(requests)
        """`num_unfinished`: sequences whose last delta was not taken yet."""
        self.num_finished = 0
        """Sequences whose last delta has arrived."""
        self.change_first: Callable[[int, Delta], Delta] | None = None
        """Replaces the first delta of each sequence, given its index."""
        self._on_cancel: Callable[[], None] | None = None
        self._started: set[int] = set()
        self._detokenizers = [DeltaDetokenizer(tokenizer, request) for request in requests]
        self._on_finish = on_finish
        self._is_discarded = False
        self._deltas: list[tuple[int, Delta]] = []
        self._arrival: asyncio.Future[None] | None = None

    def put(self, index: int, delta: Delta) -> None:
        if self._is_discarded:
            return
        self._deltas.append((index, delta))
        if self._arrival is not None and not self._arrival.done():
            self._arrival.set_result(None)
        if delta.finish is not None:
            self.num_finished += 1
            self._on_finish(delta)

    async def take(self) -> list[tuple[int, Delta]]:
        """Wait for at least one delta, and return all that have arrived."""
        if not self._deltas:
            self._arrival = asyncio.get_running_loop().create_future()
            await self._arrival
        deltas, self._deltas = self._deltas, []
        self.num_unfinished -= sum(delta.finish is not None for _, delta in deltas)
        return [(index, self._with_text(index, delta)) for index, delta in deltas]

    def _with_text(self, index: int, delta: Delta) -> Delta:
        delta = self._detokenizers[index].add(delta)
        if self.change_first is None:
            return delta
        is_first = index not in self._started
        self._started.add(index)
        return self.change_first(index, delta) if is_first and not delta.error else delta

    def set_on_cancel(self, on_cancel: Callable[[], None]) -> None:
        """Set what cancels the sequences, once they are submitted; they may have been discarded meanwhile."""
        self._on_cancel = on_cancel
        if self._is_discarded:
            on_cancel()

    def cancel(self) -> None:
        """Cancel the sequences that have not finished."""
        if self._on_cancel is not None and self.num_finished < self.size:
            self._on_cancel()

    def discard(self) -> int:
        """Cancel the sequences, and ignore their deltas; return how many have finished before."""
        self._is_discarded = True
        self.cancel()
        return self.num_finished
