"""Sampled tokens on their way to clients: dispatched, read from the device, emitted to the handles of their sequences.

Without grammars, tokens are read and emitted one iteration after they were dispatched. The masks of a grammar depend on
all tokens before, so that a step with masks reads everything that is pending. Work that the masks do not depend on
waits: tokens are emitted after the next forward call is dispatched, while the device is busy.
"""

from collections import deque

import jax
import numpy as np

from maxhydra.data import Tokenizer
from maxhydra.decode.grammar import Constraint, GrammarCompiler
from maxhydra.decode.pending import PendingTokens, ReadTokens
from maxhydra.decode.prompt_scores import token_logprob
from maxhydra.decode.sampler import SampledTokens
from maxhydra.decode.scheduler import Scheduler
from maxhydra.decode.sequence import Sequence


class Emitter:
    """Reads and emits the tokens of an engine, in the order of their dispatch."""

    def __init__(
        self, scheduler: Scheduler, grammars: GrammarCompiler, tokenizer: Tokenizer, *, eos: frozenset[int]
    ) -> None:
        self._scheduler, self._grammars, self._tokenizer, self._eos = scheduler, grammars, tokenizer, eos
        self._pending: deque[PendingTokens] = deque()
        self._read: deque[tuple[PendingTokens, ReadTokens]] = deque()
        self._num_earlier = 0
        """Calls of earlier iterations whose tokens are not emitted."""
        self.num_tokens = 0
        """Tokens emitted so far."""
        self.num_drafted = self.num_accepted = 0
        """Tokens drafted and accepted by speculative decoding."""

    @property
    def is_idle(self) -> bool:
        return not (self._pending or self._read)

    def add(self, pending: PendingTokens) -> None:
        """Take the tokens of a call that was dispatched."""
        self._pending.append(pending)

    def start_iteration(self) -> None:
        """Regard all calls so far as those of earlier iterations."""
        self._num_earlier = len(self._read) + len(self._pending)

    def end_iteration(self) -> None:
        """Emit the tokens of earlier iterations, unless this iteration has read them for its masks."""
        for _ in range(self._num_earlier):
            self._emit(*(self._read.popleft() if self._read else self._read_next()))
        self._num_earlier = 0

    def read_all(self) -> None:
        """Emit the tokens read so far, then read all others, and advance the grammars by them."""
        self._emit_read()
        while self._pending:
            self._read.append(self._read_next())
        self._num_earlier = 0

    def emit_all(self) -> None:
        self.read_all()
        self._emit_read()

    def _emit_read(self) -> None:
        while self._read:
            self._emit(*self._read.popleft())

    def _read_next(self) -> tuple[PendingTokens, ReadTokens]:
        """Wait for the tokens of the next call."""
        pending = self._pending.popleft()
        read = pending.read()
        consumed: list[tuple[Constraint, list[int]]] = [
            (sequence.constraint, new)
            for sequence, new in zip(pending.sequences, read.tokens, strict=pending.sampled is not None)
            if sequence is not None and sequence.constraint is not None and not sequence.is_finished and min(new) >= 0
        ]
        if consumed:
            self._grammars.consume(consumed)
        return pending, read

    def _emit(self, pending: PendingTokens, read: ReadTokens) -> None:
        """Send tokens to the handles of their sequences, and free the slots of sequences that end."""
        for record in pending.records:
            record.deliver()
        finished: list[Sequence] = []
        sampled: SampledTokens | None = None
        for row, sequence in enumerate(pending.sequences):
            if sequence is None or sequence.is_finished or pending.sampled is None:
                continue
            if read.drafts is not None:
                self.num_drafted += read.drafts[row].drafted
                self.num_accepted += read.drafts[row].accepted
            top, steps = sequence.request.logprobs, read.steps[row]
            logprobs = []
            if top is not None:
                sampled = sampled or _to_host(pending.sampled)
                logprobs = [token_logprob(sampled, (step, row), top, pending.version) for step in steps]
            self.num_tokens += sequence.append(read.tokens[row], logprobs, tokenizer=self._tokenizer, eos=self._eos)
            if sequence.constraint is not None and not sequence.is_finished and (error := sequence.constraint.error):
                sequence.fail(f"the grammar cannot be followed: {error[:500]}")
            if sequence.is_finished:
                finished.append(sequence)
        # Free slots after all deltas are sent: bookkeeping must not delay clients.
        for sequence in finished:
            self._scheduler.release(sequence)


def _to_host(sampled: SampledTokens) -> SampledTokens:
    """Arrays [steps, B, ...] of a call."""
    arrays: SampledTokens = jax.tree.map(np.asarray, sampled)
    return arrays if arrays.token_B.ndim == 2 else jax.tree.map(lambda array: array[None], arrays)
