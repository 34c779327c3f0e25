"""Which sequences are worked on next. No arrays here: counts, pages and places.

First come, first served: a sequence waits until there is a place among those decoded and there are pages for its prompt
and all the tokens it may write, so that one that has begun always ends; a later, smaller one does not overtake it.
Prompts are read in chunks between the steps of the others. A sequence that is over leaves nothing behind: the work of a
step depends on those that wait, are read and run.
"""

from collections import deque
from typing import NamedTuple

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.decode.page_pool import Key, PagePool
from maxhydra.decode.sequence import Sequence


class PrefillChunk(NamedTuple):
    """Tokens of a prompt that are read in one go."""

    sequence: Sequence
    start: int
    stop: int

    @property
    def length(self) -> int:
        return self.stop - self.start

    @property
    def is_last(self) -> bool:
        return self.stop == len(self.sequence.request.prompt)


class Scheduler:
    """Queue, places and pages."""

    def __init__(self, config: Config, pages: int, *, remembers: bool):
        self.pool = PagePool(pages, config.page_size, remembers=remembers)
        self.chunk = config.prefill_chunk
        self.waiting: deque[Sequence] = deque()
        self.reading: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_slots = list(reversed(range(config.max_batch)))

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to do but to go on with what runs."""
        return not (self.waiting or self.reading)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.reading or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def clear_cancelled(self) -> None:
        """Let go of sequences that were given up."""
        for sequence in [s for s in self.reading + self.running if s.handle.is_cancelled]:
            sequence.cancel()
            self.leave(sequence)
        if any(s.handle.is_cancelled for s in self.waiting):
            for sequence in self.waiting:
                if sequence.handle.is_cancelled:
                    sequence.cancel()
            self.waiting = deque(s for s in self.waiting if not s.is_over)

    def next_parts(self) -> list[PrefillChunk]:
        """Prompts to read now, together at most a chunk: as many rows as the longest part leaves room for.

        A prompt that goes on from a page which this very call computes waits a turn, and finds the page then.
        """
        parts: list[PrefillChunk] = []
        promised: set[Key] = set()
        longest = 0
        for sequence in self.reading:
            if not self._fits(sequence, longest, len(parts)):
                break
            parts.append(self._part(sequence))
            longest = max(longest, parts[-1].length)
        while self.waiting and len(parts) == len(self.reading) and self._free_slots:
            sequence = self.waiting[0]
            key = self.pool.next_key(sequence.request.prompt)
            if key in promised or not self._fits(sequence, longest, len(parts)) or not self._admit(sequence):
                break
            if key is not None:
                promised.add(key)
            parts.append(self._part(sequence))
            longest = max(longest, parts[-1].length)
        return parts

    def read(self, parts: list[PrefillChunk]) -> None:
        """These parts were sent to the device; prompts that are read whole are decoded from now on."""
        for part in parts:
            sequence = part.sequence
            sequence.computed = part.stop
            self._publish(sequence)
            if sequence.is_prompt_read:
                self.reading.remove(sequence)
                self.running.append(sequence)

    def next_rows(self) -> list[Sequence]:
        """Sequences of which another token is drawn now."""
        return [sequence for sequence in self.running if sequence.left > 0]

    def leave(self, sequence: Sequence) -> None:
        """Free the place and the pages of a sequence that is over; its full pages can be found by others."""
        assert sequence.lease is not None
        self._publish(sequence)
        (self.running if sequence in self.running else self.reading).remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.lease)

    def _publish(self, sequence: Sequence) -> None:
        """Only tokens that are known here have a name, and only those that were read have keys and values."""
        assert sequence.lease is not None
        known = min(sequence.computed, len(sequence.tokens))
        self.pool.publish(sequence.lease, sequence.tokens, known)

    def _fits(self, sequence: Sequence, longest: int, rows: int) -> bool:
        """Whether a row beside so many, the longest of this length, keeps the call within a chunk; one row always
        may."""
        left = min(len(sequence.request.prompt) - sequence.computed, self.chunk)
        return rows == 0 or max(longest, left) * (rows + 1) <= self.chunk

    def _admit(self, sequence: Sequence) -> bool:
        lease = self.pool.reserve(sequence.request.prompt, sequence.places)
        if lease is None:
            return False
        self.waiting.popleft()
        sequence.settle(lease, self._free_slots.pop(), self.pool.page_size)
        self.reading.append(sequence)
        return True

    def _part(self, sequence: Sequence) -> PrefillChunk:
        return PrefillChunk(
            sequence, sequence.computed, min(sequence.computed + self.chunk, len(sequence.request.prompt))
        )
