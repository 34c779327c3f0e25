"""Results of calls that were dispatched to the device and not read yet. B rows, T tokens per row."""

from collections.abc import Callable
from collections.abc import Sequence as List
from typing import NamedTuple

import jax
import numpy as np

from maxhydra.decode.grammar import Verification
from maxhydra.decode.prompt_scores import PendingScores
from maxhydra.decode.sampler import SampledTokens
from maxhydra.decode.sequence import Sequence


class PendingExperts(NamedTuple):
    """Experts of the input tokens of a call."""

    sequences: list[Sequence | None]
    """The sequence of each row; None for padding."""
    counts: list[int]
    """Tokens of each row, which follow those of the sequence's previous call."""
    ids_BTLK: jax.Array
    is_used_TB: jax.Array | None = None
    """Which inputs are tokens of the sequence, if the host does not know the counts; see PendingVerified."""

    def deliver(self) -> None:
        """Wait for the experts, and add them to the sequences."""
        ids = np.asarray(self.ids_BTLK)
        is_used = None if self.is_used_TB is None else np.asarray(self.is_used_TB)
        for row, (sequence, count) in enumerate(zip(self.sequences, self.counts, strict=True)):
            if sequence is not None:
                sequence.experts.append(ids[row, :count] if is_used is None else ids[row, is_used[:, row]])


class PendingVerified(NamedTuple):
    """What only the device knows about a call that is speculative or follows one, when it is dispatched."""

    is_used_TB: jax.Array
    """Which tokens of the call belong to the sequences."""
    drafted_B: jax.Array | None
    """Number of drafted tokens of each row; None of a call without drafts."""
    accepted_B: jax.Array | None


class PendingTokens(NamedTuple):
    """Tokens that were dispatched to the device and not read yet."""

    sequences: list[Sequence | None]
    """The sequence of each row; None for rows that sample nothing, such as padding or an unfinished prefill."""
    sampled: SampledTokens | None
    """Of one step [B], or of a multi-step call [steps, B]. None if no row samples, and the call has only `records`."""
    counts: list[int]
    """Valid tokens of each row; of a speculative call at least, unless the sequence is complete with fewer."""
    version: int
    """Version of the weights that sampled them."""
    records: tuple[PendingExperts | PendingScores, ...] = ()
    """What else the call computed for its sequences."""
    verified: PendingVerified | None = None
    """None if the host knows the counts."""
    num_restarts: list[int] | None = None
    """Of a call without masks for rows with a grammar: `Sequence.num_restarts` of each row when it is dispatched."""
    logits_SBV: jax.Array | None = None
    """Of all steps of such a call."""
    on_arrival: Callable[[], None] | None = None
    """Called when the tokens have arrived."""

    def truncate(self, verifications: List[Verification | None]) -> "PendingTokens":
        """The call with the tokens that the grammars accept."""
        pairs = list(zip(self.counts, verifications, strict=True))
        counts = [count if each is None else each.num_accepted for count, each in pairs]
        # The rejected token is sampled again from the same logits.
        inputs = [count if each is None else each.num_accepted + each.is_rejected for count, each in pairs]
        records = tuple(
            each._replace(counts=inputs) if isinstance(each, PendingExperts) else each for each in self.records
        )
        return self._replace(counts=counts, records=records)

    def read(self) -> "ReadTokens":
        """Wait for the tokens, and correct the counts of the sequences if the host did not know them; once per call."""
        if self.sampled is None:
            return ReadTokens([], [])
        token_B = np.asarray(self.sampled.token_B)
        if self.on_arrival is not None:
            self.on_arrival()
        columns: list[list[int]] = (token_B.T if token_B.ndim == 2 else token_B[:, None]).tolist()
        if self.verified is None:
            steps = [range(count) for count in self.counts]
            return ReadTokens([c[:n] for c, n in zip(columns, self.counts, strict=True)], steps)
        is_used_TB, *numbers = (np.asarray(array) for array in jax.tree.leaves(self.verified))
        drafts = [RowDrafts(*each) for each in zip(*(array.tolist() for array in numbers), strict=True)]
        used = [np.flatnonzero(row).tolist() for row in is_used_TB.T]
        tokens = [[column[step] for step in steps] for column, steps in zip(columns, used, strict=True)]
        for sequence, counted, new in zip(self.sequences, self.counts, tokens, strict=True):
            if sequence is not None:
                sequence.correct_counts(counted, len(new), len(is_used_TB))
        return ReadTokens(tokens, used, drafts or None)


class PrefillOutput(NamedTuple):
    """Results of a prefill call, on the devices."""

    first_tokens: PendingTokens | None
    """Of the prompts that are complete; None if there are none."""
    logits_BV: jax.Array


class RowDrafts(NamedTuple):
    """Numbers of tokens that were drafted for a row, and accepted."""

    drafted: int
    accepted: int


class ReadTokens(NamedTuple):
    """Tokens of a call on the host."""

    tokens: list[list[int]]
    """Valid tokens of each row; empty if no row samples."""
    steps: list[range] | list[list[int]]
    """Their steps."""
    drafts: list[RowDrafts] | None = None
    """Of a speculative call."""
    verifications: list[Verification | None] | None = None
    """Of a call without masks for rows with a grammar; None for the other rows."""

    def truncate(self, verifications: list[Verification | None]) -> "ReadTokens":
        """The tokens that the grammars accept."""
        counts = [
            len(new) if verification is None else verification.num_accepted
            for new, verification in zip(self.tokens, verifications, strict=True)
        ]
        tokens = [new[:count] for new, count in zip(self.tokens, counts, strict=True)]
        return ReadTokens(tokens, [range(count) for count in counts], self.drafts, verifications)


def start_copy(rows: list[Sequence | None], sampled: SampledTokens, counts: list[int], version: int) -> PendingTokens:
    """Count the tokens as scheduled, and start their copy to the host, instead of when the host reads them."""
    for sequence, count in zip(rows, counts, strict=True):
        if sequence is not None:
            sequence.num_scheduled += count
    for array in jax.tree.leaves(sampled):
        array.copy_to_host_async()
    return PendingTokens(rows, sampled, counts, version)


def group_rejected(sequences: List[Sequence]) -> list[tuple[jax.Array, int, list[Sequence | None]]]:
    """Of each call with tokens that grammars rejected: its logits, their version, and its rows with their sequences."""
    calls: dict[int, tuple[jax.Array, int, list[Sequence | None]]] = {}
    for sequence in sequences:
        if (rejected := sequence.rejected) is not None:
            logits_SBV = rejected.logits_SBV
            rows: list[Sequence | None] = [None] * logits_SBV.shape[1]
            *_, rows = calls.setdefault(id(logits_SBV), (logits_SBV, rejected.version, rows))
            rows[rejected.row] = sequence
    return list(calls.values())
