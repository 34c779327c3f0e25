"""The scheduler: decides which sequences are prefilled and decoded next. It holds no arrays, only counts and slots.

First come, first served: a sequence waits until there is a batch slot, and pages for its prompt and all tokens it may
generate, so that a sequence that has started always finishes without preemption. A later, smaller one does not overtake
it. Prompts are prefilled in chunks between the decode steps of the others. Finished sequences leave no state behind:
the cost of a step depends only on the sequences that wait, are prefilled or run.
"""

from collections import deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from maxhydra.config.schema.decode import Engine as Config
from maxhydra.decode.page_pool import Key, PagePool
from maxhydra.decode.sequence import Sequence


class PrefillChunk(NamedTuple):
    """Prompt tokens [start, stop) of a sequence that are prefilled in one call."""

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
    """Owns the queue, the batch slots and the page pool."""

    def __init__(
        self,
        config: Config,
        num_pages: int,
        *,
        prefix_cache: bool,
        prefill_chunk: int,
        round_tokens: Callable[[int], int],
    ):
        """`round_tokens`: tokens per row of the bucket for a chunk of this length."""
        self.pool = PagePool(num_pages, config.page_size, prefix_cache=prefix_cache)
        self.prefill_chunk, self._round_tokens = prefill_chunk, round_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.running: list[Sequence] = []
        self._free_slots = list(reversed(range(config.max_batch)))

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def sequences(self) -> list[Sequence]:
        """Return all sequences that wait, are prefilled or run."""
        return [*self.waiting, *self.prefilling, *self.running]

    def drop(self, numbers: Collection[int]) -> None:
        """Cancel the sequences with these numbers, and free their slots and pages."""
        if not numbers:
            return
        for sequence in [s for s in self.prefilling + self.running if s.number in numbers]:
            sequence.cancel()
            self.release(sequence)
        for sequence in self.waiting:
            if sequence.number in numbers:
                sequence.cancel()
        self.waiting = deque(s for s in self.waiting if not s.is_finished)

    def next_chunks(self) -> list[PrefillChunk]:
        """Return the chunks of the next prefill call, at most `prefill_chunk` tokens including padding.

        A prompt whose prefix includes a page that this very call computes waits for the next call and shares the page.
        """
        chunks: list[PrefillChunk] = []
        computed_keys: set[Key] = set()
        longest = 0
        for sequence in self.prefilling:
            if not self._fits(sequence, longest, len(chunks)):
                break
            chunks.append(self._next_chunk(sequence))
            longest = max(longest, chunks[-1].length)
        while self.waiting and len(chunks) == len(self.prefilling) and self._free_slots:
            sequence = self.waiting[0]
            key = self.pool.next_missing_key(sequence.request.prompt)
            if key in computed_keys or not self._fits(sequence, longest, len(chunks)) or not self._admit(sequence):
                break
            if key is not None:
                computed_keys.add(key)
            chunks.append(self._next_chunk(sequence))
            longest = max(longest, chunks[-1].length)
        return chunks

    def mark_prefilled(self, chunks: list[PrefillChunk]) -> None:
        """Record that chunks were dispatched; sequences with a complete prompt start to run."""
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            self._publish(sequence)
            if sequence.is_prefilled:
                self.prefilling.remove(sequence)
                self.running.append(sequence)

    def next_rows(self) -> list[Sequence]:
        """Return the running sequences that still need tokens."""
        return [sequence for sequence in self.running if sequence.remaining > 0]

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a finished sequence; its full pages stay in the prefix cache."""
        assert sequence.lease is not None
        self._publish(sequence)
        (self.running if sequence in self.running else self.prefilling).remove(sequence)
        self._free_slots.append(sequence.slot)
        self.pool.release(sequence.lease)

    def _publish(self, sequence: Sequence) -> None:
        """Add full pages to the prefix cache: those whose tokens the host knows and whose KV cache is computed."""
        assert sequence.lease is not None
        num_known = min(sequence.num_computed, len(sequence.tokens))
        self.pool.publish(sequence.lease, sequence.tokens, num_known)

    def _fits(self, sequence: Sequence, longest: int, rows: int) -> bool:
        """Return True if adding this row keeps the padded call within `prefill_chunk` tokens; one row always fits."""
        length = min(len(sequence.request.prompt) - sequence.num_computed, self.prefill_chunk)
        return rows == 0 or self._round_tokens(max(longest, length)) * (rows + 1) <= self.prefill_chunk

    def _admit(self, sequence: Sequence) -> bool:
        """Give the first waiting sequence its pages and a slot; return False if there are not enough pages."""
        lease = self.pool.reserve(sequence.request.prompt, sequence.cache_tokens)
        if lease is None:
            return False
        self.waiting.popleft()
        sequence.admit(lease, self._free_slots.pop(), self.pool.page_size)
        self.prefilling.append(sequence)
        return True

    def _next_chunk(self, sequence: Sequence) -> PrefillChunk:
        start = sequence.num_computed
        return PrefillChunk(sequence, start, min(start + self.prefill_chunk, len(sequence.request.prompt)))
