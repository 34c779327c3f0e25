"""The scheduler: decides which sequences are prefilled and decoded next. It holds no arrays, only counts and slots.

First come, first served: a sequence waits until there is a batch slot, and pages for its prompt and all tokens it may
generate, so that a sequence that has started always finishes without preemption. A later, smaller one does not overtake
it. With several groups of devices it gets the least loaded one that has the pages. Prompts are prefilled in chunks
between the decode steps of the others. Finished sequences leave no state behind: the cost of a step depends only on the
sequences that wait, are prefilled or run.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from typing import NamedTuple

from maxhydra.decode.page_pool import Capacity, Key, Place
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

    @property
    def place(self) -> Place:
        assert self.sequence.prefill_place is not None
        return self.sequence.prefill_place


class PrefillCall:
    """Collects the chunks of one prefill call, at most `max_tokens` tokens per group including padding."""

    def __init__(self, max_tokens: int, round_tokens: Callable[[int], int]):
        self._max_tokens, self._round_tokens = max_tokens, round_tokens
        self._longest, self._rows = 0, Counter[int]()
        self.chunks: list[PrefillChunk] = []
        self.computed_keys: set[tuple[int, Key]] = set()
        """Group and key of the first page that each new prompt computes."""
        self.full_groups: set[int] = set()

    def fits(self, sequence: Sequence, group: int) -> bool:
        """Return True if adding this row keeps every group within `max_tokens`; one row per group always fits."""
        longest = max(self._longest, self._next_length(sequence))
        rows = max([self._rows[group] + 1, *self._rows.values()])
        return rows == 1 or self._round_tokens(longest) * rows <= self._max_tokens

    def add(self, sequence: Sequence) -> None:
        """Add the next chunk of a sequence."""
        start, length = sequence.num_computed, self._next_length(sequence)
        chunk = PrefillChunk(sequence, start, start + length)
        self.chunks.append(chunk)
        self._rows[chunk.place.group] += 1
        self._longest = max(self._longest, length)

    def _next_length(self, sequence: Sequence) -> int:
        return min(len(sequence.request.prompt) - sequence.num_computed, self._max_tokens)


class Scheduler:
    """Owns the queue, and the batch slots and pages of the groups."""

    def __init__(
        self,
        capacity: Capacity,
        prefill_capacity: Capacity,
        *,
        prefill_chunk: int,
        round_tokens: Callable[[int], int],
    ):
        """`prefill_capacity`: the same one, unless prompts are prefilled on separate devices. `prefill_chunk`: maximum
        number of tokens of a prefill call per group. `round_tokens`: tokens per row of the bucket for a chunk of this
        length."""
        self.capacity, self.prefill_capacity = capacity, prefill_capacity
        self._is_separate = prefill_capacity is not capacity
        self._prefill_chunk, self._round_tokens = prefill_chunk, round_tokens
        self.waiting: deque[Sequence] = deque()
        self.prefilling: list[Sequence] = []
        self.arriving: list[Sequence] = []
        """Prefilled on separate devices, and not yet copied to those that decode."""
        self.running: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.prefilling or self.arriving or self.running)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    def sequences(self) -> list[Sequence]:
        """Return all sequences that wait, are prefilled or run."""
        return [*self.waiting, *self.prefilling, *self.arriving, *self.running]

    def drop(self, numbers: Collection[int]) -> None:
        """Cancel the sequences with these numbers, and free their slots and pages."""
        if not numbers:
            return
        for sequence in [s for s in self.prefilling + self.arriving + self.running if s.number in numbers]:
            sequence.cancel()
            self.release(sequence)
        for sequence in self.waiting:
            if sequence.number in numbers:
                sequence.cancel()
        self.waiting = deque(s for s in self.waiting if not s.is_finished)

    def next_chunks(self) -> list[PrefillChunk]:
        """Return the chunks of the next prefill call.

        A prompt whose prefix includes a page that this very call computes waits for the next call and shares the page.
        """
        call = PrefillCall(self._prefill_chunk, self._round_tokens)
        for sequence in self.prefilling:
            assert sequence.prefill_place is not None
            group = sequence.prefill_place.group
            if group in call.full_groups or not call.fits(sequence, group):
                call.full_groups.add(group)
            else:
                call.add(sequence)
        while self.waiting and self._admit(self.waiting[0], call):
            sequence = self.waiting.popleft()
            self.prefilling.append(sequence)
            call.add(sequence)
        return call.chunks

    def mark_prefilled(self, chunks: list[PrefillChunk]) -> None:
        """Record that chunks are dispatched before the next ones; sequences with a complete prompt start to run.

        If they run on other devices, they first have to arrive there, and leave their prefill place: calls dispatched
        later cannot overwrite the pages before they are copied.
        """
        for chunk in chunks:
            sequence = chunk.sequence
            sequence.num_computed = chunk.stop
            self._publish(sequence)
            if sequence.is_prefilled:
                self.prefilling.remove(sequence)
                (self.arriving if self._is_separate else self.running).append(sequence)
                if self._is_separate:
                    self.prefill_capacity.release(chunk.place)

    def mark_arrived(self, sequence: Sequence) -> None:
        """Record that the copy of a sequence was dispatched; it starts to run."""
        self.arriving.remove(sequence)
        self.running.append(sequence)

    def next_rows(self) -> list[Sequence]:
        """Return the running sequences that still need tokens."""
        return [sequence for sequence in self.running if sequence.remaining > 0]

    def release(self, sequence: Sequence) -> None:
        """Free the slot and the pages of a finished sequence; its full pages stay in the prefix cache."""
        assert sequence.place is not None and sequence.prefill_place is not None
        if not self._is_separate:
            self._publish(sequence)
        owner = next(each for each in (self.running, self.arriving, self.prefilling) if sequence in each)
        owner.remove(sequence)
        self.capacity.release(sequence.place)
        if self._is_separate and owner is self.prefilling:
            self.prefill_capacity.release(sequence.prefill_place)

    def _publish(self, sequence: Sequence) -> None:
        """Add full pages to the prefix cache: those whose tokens the host knows and whose KV cache is computed."""
        assert sequence.prefill_place is not None
        if sequence.has_media:
            return
        self.prefill_capacity.publish(sequence.prefill_place, sequence.tokens, sequence.num_cached)

    def _admit(self, sequence: Sequence, call: PrefillCall) -> bool:
        """Give a waiting sequence its pages and a slot; return False if no group has them, or this call is full."""
        place = self._reserve_decode_place(sequence) if self._is_separate else None
        if self._is_separate and place is None:
            return False
        prompt, capacity = () if sequence.is_alone else sequence.request.prompt, self.prefill_capacity
        num_tokens = len(sequence.request.prompt) if self._is_separate else sequence.cache_tokens
        root = 0 if sequence.adapter is None else sequence.adapter.prefix_root
        for group in capacity.order_groups(prompt, root):
            key = capacity.pools[group].next_missing_key(prompt, root)
            is_computed = key is not None and (group, key) in call.computed_keys
            if group in call.full_groups or is_computed or not call.fits(sequence, group):
                continue
            prefill_place = capacity.reserve(group, prompt, num_tokens, root)
            if prefill_place is not None:
                sequence.admit(place or prefill_place, prefill_place, capacity.page_size)
                if key is not None:
                    call.computed_keys.add((group, key))
                return True
        if place is not None:
            self.capacity.release(place)
        return False

    def _reserve_decode_place(self, sequence: Sequence) -> Place | None:
        """Reserve a place on the devices that decode; None if there is none at the moment."""
        for group in self.capacity.order_groups(()):
            if place := self.capacity.reserve(group, (), sequence.cache_tokens):
                return place
        return None
