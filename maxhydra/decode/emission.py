"""Sampled tokens on their way to clients: dispatched, read from the device, emitted to the handles of their sequences.

Tokens are read and emitted one iteration after they were dispatched. Another thread reads those of sequences with a
grammar, and verifies them if they were sampled without masks: from the first rejected token on, all that were sampled
are dropped until the sequence restarts (mask_policy.py). A step with masks, which depend on all tokens before, waits
for everything that is pending; the thread computes them while the engine's thread dispatches the next forward call and
emits earlier tokens.
"""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax
import numpy as np

from maxhydra.data import Tokenizer
from maxhydra.decode.grammar import Constraint, GrammarCompiler, Verification
from maxhydra.decode.mask_policy import MaskPolicy
from maxhydra.decode.pending import PendingTokens, ReadTokens
from maxhydra.decode.prompt_scores import token_logprob
from maxhydra.decode.sampler import SampledTokens
from maxhydra.decode.scheduler import Scheduler
from maxhydra.decode.sequence import RejectedToken, Sequence

Read = tuple[PendingTokens, ReadTokens]


class Emitter:
    """Reads and emits the tokens of an engine, in the order of their dispatch."""

    def __init__(
        self,
        scheduler: Scheduler,
        grammars: GrammarCompiler,
        mask_policy: MaskPolicy,
        tokenizer: Tokenizer,
        *,
        eos: frozenset[int],
    ) -> None:
        self._scheduler, self._grammars, self._tokenizer, self._eos = scheduler, grammars, tokenizer, eos
        self._mask_policy = mask_policy
        self._pending: deque[tuple[PendingTokens, Future[Read] | None]] = deque()
        """Calls that were dispatched; with a future if another thread reads their tokens."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="decode-grammar")
        self._read: deque[Read] = deque()
        self._num_earlier = 0
        """Calls of earlier iterations whose tokens are not emitted."""
        self.flushes: list[Callable[[], None]] = []
        """Called after the deltas of a call."""
        self.num_tokens = 0
        """Tokens emitted so far."""
        self.num_drafted = self.num_accepted = 0
        """Tokens drafted and accepted by speculative decoding."""
        self.num_allowed = self.num_rejected = 0
        """Tokens that were sampled without masks, and that grammars accepted and rejected."""

    @property
    def is_idle(self) -> bool:
        return not (self._pending or self._read)

    @property
    def is_verifying(self) -> bool:
        """Whether grammars have yet to verify tokens: sequences may restart."""
        return any(pending.num_restarts is not None for pending, _ in self._pending)

    def flush(self) -> None:
        """Let listeners send the deltas that they have received."""
        for flush in self.flushes:
            flush()

    def close(self) -> None:
        """Wait for the thread that reads tokens."""
        self._reader.shutdown()

    def add(self, pending: PendingTokens) -> None:
        """Take the tokens of a call that was dispatched."""
        is_constrained = any(each is not None and each.constraint is not None for each in pending.sequences)
        future = self._reader.submit(self._advance_grammars, pending) if is_constrained else None
        self._pending.append((pending, future))

    def start_iteration(self) -> None:
        """Regard all calls so far as those of earlier iterations."""
        self._num_earlier = len(self._read) + len(self._pending)

    def end_iteration(self) -> None:
        """Emit the tokens of earlier iterations, unless this iteration has read them for its masks."""
        for _ in range(self._num_earlier):
            self._emit(*(self._read.popleft() if self._read else self._read_next()))
        self._num_earlier = 0

    def read_all(self) -> None:
        """Emit the tokens read so far, then read all others; grammars have advanced by them."""
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

    def _read_next(self) -> Read:
        """Wait for the tokens of the next call."""
        pending, future = self._pending.popleft()
        return (pending, pending.read()) if future is None else future.result()

    def _advance_grammars(self, pending: PendingTokens) -> Read:
        """Wait for the tokens of a call, and advance the grammars of its sequences by them."""
        read, rows = pending.read(), list[Constraint | None]()
        if pending.num_restarts is not None:
            rows = [None if each is None or each.is_finished else each.constraint for each in pending.sequences]
            verifications = self._grammars.verify(rows, read.tokens, pending.num_restarts)
            return pending.truncate(verifications), read.truncate(verifications)
        rows = [
            None if sequence is None or sequence.is_finished or min(new) < 0 else sequence.constraint
            for sequence, new in zip(pending.sequences, read.tokens, strict=pending.sampled is not None)
        ]
        if any(rows):
            self._grammars.advance(rows, read.tokens, needs_masks=self._mask_policy.is_masking)
        return pending, read

    def _follow(self, sequence: Sequence, verification: Verification, row: int, pending: PendingTokens) -> None:
        """Count the tokens of a call without masks, and let the sequence restart if one was rejected."""
        self._mask_policy.record(sequence, verification)
        self.num_allowed += verification.num_accepted
        self.num_rejected += verification.is_rejected
        if verification.is_rejected and not sequence.is_finished:
            assert pending.logits_SBV is not None
            sequence.restart(RejectedToken(pending.logits_SBV, verification.num_accepted, row, pending.version))

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
                drafts = read.drafts[row]
                self.num_drafted += drafts.drafted
                self.num_accepted += drafts.accepted
                sequence.num_drafted += drafts.drafted
                sequence.num_accepted += drafts.accepted
            top, steps = sequence.request.logprobs, read.steps[row]
            logprobs = []
            if top is not None:
                sampled = sampled or _to_host(pending.sampled)
                logprobs = [token_logprob(sampled, (step, row), top, pending.version) for step in steps]
            self.num_tokens += sequence.append(read.tokens[row], logprobs, tokenizer=self._tokenizer, eos=self._eos)
            if read.verifications is not None and (verification := read.verifications[row]) is not None:
                self._follow(sequence, verification, row, pending)
            if sequence.constraint is not None and not sequence.is_finished and (error := sequence.constraint.error):
                sequence.fail(f"the grammar cannot be followed: {error[:500]}")
            if sequence.is_finished:
                finished.append(sequence)
        self.flush()
        # Free slots after all deltas are sent: bookkeeping must not delay clients.
        for sequence in finished:
            self._scheduler.release(sequence)


def _to_host(sampled: SampledTokens) -> SampledTokens:
    """Arrays [steps, B, ...] of a call."""
    arrays: SampledTokens = jax.tree.map(np.asarray, sampled)
    return arrays if arrays.token_B.ndim == 2 else jax.tree.map(lambda array: array[None], arrays)
