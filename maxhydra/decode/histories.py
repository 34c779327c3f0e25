"""Token histories on the device: which tokens of each sequence they and the cache of the draft model have."""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as List

import jax
import numpy as np

from maxhydra.decode.adapters import StepWeights
from maxhydra.decode.cache_arrays import CacheArrays
from maxhydra.decode.drafting import UNKNOWN, DraftState, TokenHistory
from maxhydra.decode.page_pool import Place
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.step_inputs import Buckets, fill_inputs
from maxhydra.decode.steps import CompiledSteps


class FillChunk(PrefillChunk):
    """Tokens [start, stop) of a sequence that the draft model's cache may lack."""

    __slots__ = ()

    @property
    def place(self) -> Place:
        assert self.sequence.place is not None
        return self.sequence.place


class Histories:
    """The state of speculative decoding on the device, and which sequence each slot of it belongs to."""

    def __init__(
        self, programs: CompiledSteps, buckets: Buckets, length: int, *, draft_cache: CacheArrays | None = None
    ):
        """`length`: tokens of the longest sequence. `draft_cache`: None without a draft model."""
        self._programs, self._buckets = programs, buckets
        slots, sharding = programs.padding_slot + 1, programs.replicated
        history = jax.jit(lambda: TokenHistory.empty(slots, length), out_shardings=sharding)()
        self.arrays = DraftState(history, None if draft_cache is None else draft_cache.empty())
        self._has_draft_model, self._length = draft_cache is not None, length
        self._owners: dict[int, int] = {}
        """Slot -> number of the sequence whose tokens are in the history."""
        self._filled: dict[int, tuple[int, int | None]] = {}
        """Slot -> number of its sequence, and how many of the first tokens the draft model's cache has; None: all,
        since the last step was a speculative one."""
        self._set = jax.jit(_set_row, donate_argnums=0, out_shardings=sharding)

    def warm_up(self) -> None:
        """Compile the program that sets a row, by setting that of the padding slot."""
        self._set_row(self._programs.padding_slot, np.zeros(self._length, np.int32), 0, 0)

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Set the rows of sequences whose last step did not use the history."""
        for sequence in sequences:
            assert sequence.place is not None
            slot = sequence.place.slot
            if self._owners.get(slot) == sequence.number:
                continue
            tokens_S = np.full(self._length, UNKNOWN, np.int32)
            tokens_S[: len(sequence.tokens)] = sequence.tokens
            self._set_row(slot, tokens_S, sequence.num_computed, sequence.remaining)
            self._owners[slot] = sequence.number

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Set the rows of these sequences again before their next step that uses the history."""
        for sequence in sequences:
            assert sequence.place is not None
            self._owners.pop(sequence.place.slot, None)

    def pause_drafts(self, sequences: Iterable[Sequence]) -> None:
        """The next step of these sequences is a plain one, whose tokens the draft model does not get."""
        for sequence in sequences if self._has_draft_model else ():
            assert sequence.place is not None
            slot = sequence.place.slot
            if self._filled.get(slot) == (sequence.number, None):
                # The last accepted draft was not an input of the draft model.
                self._filled[slot] = sequence.number, max(sequence.num_computed - 1, 0)

    def fill(self, sequences: List[Sequence], weights: StepWeights, interrupt: Callable[[], None]) -> bool:
        """Add the tokens that the draft model's cache lacks, before a speculative call of these sequences.

        `interrupt`: called before other calls are dispatched. False while a program for them is being compiled.
        """
        if not self._has_draft_model:
            return True
        calls = list(self._buckets.split_fill(self._missing(sequences)))
        shapes = [self._programs.choose_fill(shape) for shape, _ in calls]
        if None in shapes:
            return False
        self.add(sequences)
        for shape, (_, chunks) in zip(shapes, calls, strict=True):
            assert shape is not None
            interrupt()
            rows = self._buckets.arrange_rows(chunks, shape)
            inputs_BC = fill_inputs(rows, shape, self._programs.padding_slot)
            self.arrays = self._programs.fill(shape, weights, self.arrays, inputs_BC)
        for sequence in sequences:
            assert sequence.place is not None
            self._filled[sequence.place.slot] = sequence.number, None
        return True

    def _missing(self, sequences: Iterable[Sequence]) -> list[FillChunk]:
        """Tokens that the draft model's cache lacks, up to the last two, which are inputs of the next step."""
        chunks = []
        for sequence in sequences:
            assert sequence.place is not None
            number, filled = self._filled.get(sequence.place.slot, (-1, 0))
            start, stop = 0 if number != sequence.number else filled, sequence.num_computed + sequence.num_uncertain - 1
            if start is not None and start < stop:
                chunks.append(FillChunk(sequence, start, stop))
        return chunks

    def _set_row(self, slot: int, tokens_S: np.ndarray, last: int, remaining: int) -> None:
        numbers = np.array([slot, last, remaining], np.int32)
        self.arrays = self.arrays._replace(history=self._set(self.arrays.history, tokens_S, numbers))


def _set_row(history: TokenHistory, tokens_S: jax.Array, numbers: jax.Array) -> TokenHistory:
    """`numbers`: slot, position of the last token, and remaining tokens."""
    slot, last, remaining = numbers
    return TokenHistory(
        history.tokens_NS.at[slot].set(tokens_S),
        history.last_N.at[slot].set(last),
        history.remaining_N.at[slot].set(remaining),
    )
