"""Structured output: a grammar restricts the tokens of a completion, with masks that llguidance computes.

A mask depends on all tokens before it. So most calls sample without masks, and another thread verifies their tokens and
computes masks only where a token is rejected; see mask_policy.py. Where a batch is decoded in single steps with masks,
this thread reads the tokens of the previous step and computes the masks while the engine's thread dispatches the next
forward call and the device runs it, with several threads of llguidance, which needs no lock of Python there.

B rows, W words of 32 bits, one bit per token of the vocabulary.
"""

import operator
import os
import threading
import time
from collections.abc import Callable, Collection, Mapping
from collections.abc import Sequence as List
from functools import cached_property, lru_cache
from typing import Any, NamedTuple
from weakref import WeakSet, ref

import jax
import numpy as np

from maxhydra.data import Tokenizer
from maxhydra.decode.request import RequestRejectedError
from maxhydra.decode.sampler import ALL_TOKENS

# Compiled grammars that are kept; clients mostly repeat a few schemas.
MAX_GRAMMARS = 128
# Lexers per grammar: a few per thread, since some masks take a hundred times longer than others, and at most this much
# CPU time to compile them. A JSON schema mostly takes one millisecond.
LEXERS_PER_THREAD, MAX_LEXER_SECONDS = 4, 0.1
# A model that writes only whitespace would never complete its JSON.
WHITESPACE = r"[ \n\t]{0,20}"


class GrammarError(RequestRejectedError):
    """A grammar that cannot be used; the message says why."""


def json_grammar(schema: Mapping[str, Any]) -> str:
    """The grammar of JSON values that a schema accepts."""
    options = {"whitespace_pattern": WHITESPACE}
    grammar: str = _library().LLMatcher.grammar_from_json_schema(dict(schema), overrides=options)
    return grammar


def regex_grammar(pattern: str) -> str:
    """The grammar of texts that match a regular expression as a whole."""
    grammar: str = _library().LLMatcher.grammar_from_regex(pattern)
    return grammar


def lark_grammar(source: str) -> str:
    """A grammar in the syntax of Lark, as llguidance extends it."""
    grammar: str = _library().LLMatcher.grammar_from_lark(source)
    return grammar


def _library() -> Any:
    # Imported here: optional, and a server without such requests does not need it.
    try:
        import llguidance  # noqa: PLC0415
    except ImportError:
        raise GrammarError("structured output needs the package llguidance: pip install 'maxhydra[serve]'") from None
    return llguidance


class Verification(NamedTuple):
    """How many tokens of a call without masks a grammar accepts."""

    num_accepted: int
    is_rejected: bool
    """Whether the grammar rejects the token after the accepted ones."""


class Constraint:
    """The grammar of one sequence, after the tokens that it has generated."""

    def __init__(self, matcher: Any, lexer: int, mask_W: np.ndarray):
        """`lexer`: its number; other constraints of the same grammar may use it too."""
        self.matcher, self.lexer = matcher, lexer
        self.mask_W: np.ndarray | None = mask_W
        """The mask of the next token; None if it is not computed."""
        self.num_rejections = 0
        """Tokens without masks that the grammar rejected."""
        self.error = ""
        """Why a token or a mask failed, for example a limit of the parser; empty if nothing did."""

    def verify(self, tokens: List[int], num_restarts: int, eos: Collection[int]) -> Verification:
        """Advance by tokens that were sampled without masks, up to EOS or the first that the grammar rejects.

        A negative token, of logits that are not finite, ends the sequence too. `num_restarts`: of the sequence when
        the call was dispatched; tokens that follow a rejected one are dropped.
        """
        if num_restarts < self.num_rejections:
            return Verification(0, is_rejected=False)
        end = next((index for index, token in enumerate(tokens) if token < 0 or token in eos), len(tokens))
        accepted = self._consume_allowed(tokens[:end])
        self.mask_W = None
        if accepted == end < len(tokens) and (tokens[end] < 0 or self.matcher.is_accepting()):
            return Verification(end + 1, is_rejected=False)
        is_rejected = accepted < len(tokens)
        self.num_rejections += is_rejected
        return Verification(accepted, is_rejected)

    def _consume_allowed(self, tokens: List[int]) -> int:
        """Advance by the tokens up to the first that a mask would not have; return their number.

        Where the grammar forces a text, masks have only the first token of its canonical tokenization, but the matcher
        also consumes other tokenizations.
        """
        for count, token in enumerate(tokens):
            if self.matcher.compute_ff_bytes() and (forced := self.matcher.compute_ff_tokens()) and forced[0] != token:
                return count
            if not self.matcher.try_consume_tokens([token]):
                return count
        return len(tokens)

    def allows(self, token: int) -> bool:
        """Whether the mask, which must be computed, has this token."""
        assert self.mask_W is not None
        return bool(self.mask_W[token // 32] >> token % 32 & 1)


class CompiledGrammar:
    """A grammar with one or more lexers.

    llguidance copies a matcher in microseconds, but all copies use the same lexer, behind a lock: their masks are
    computed one after the other. So sequences that run at the same time get separate lexers, as far as threads can
    use them and compiling is cheap.
    """

    def __init__(self, compile: Callable[[], Any], max_lexers: int, mask_width: int):
        """`compile`: returns a matcher in the initial state, with a new lexer."""
        began = time.thread_time()
        first = compile()
        seconds = time.thread_time() - began
        self._compile, self._lock = compile, threading.Lock()
        self._max_lexers = max(1, min(max_lexers, int(MAX_LEXER_SECONDS / max(seconds, 1e-6))))
        self._lexers: list[tuple[Any, WeakSet[Constraint]]] = [(first, WeakSet())]
        """Of each lexer a matcher in the initial state, and the constraints that use it."""
        self.first_mask_W = np.empty(mask_width, np.uint32)
        first.unsafe_compute_mask_ptr(self.first_mask_W.ctypes.data, self.first_mask_W.nbytes)
        _reject_failed(first)

    def constrain(self) -> Constraint:
        """Return a constraint with the lexer that the fewest others use."""
        with self._lock:
            number = min(range(len(self._lexers)), key=lambda each: len(self._lexers[each][1]))
            if self._lexers[number][1] and len(self._lexers) < self._max_lexers:
                number = len(self._lexers)
                self._lexers.append((self._compile(), WeakSet()))
            initial, users = self._lexers[number]
            constraint = Constraint(initial.deep_copy(), number, self.first_mask_W)
            users.add(constraint)
        return constraint


class GrammarCompiler:
    """Compiles the grammars of an engine, and computes masks. `constrain` is thread-safe."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        eos: Collection[int],
        vocab_size: int,
        threads: int | None = None,
        upload: Callable[[np.ndarray], np.ndarray | jax.Array] = np.asarray,
    ):
        """`threads`: that compute masks; None: 80 % of the cores, the default of llguidance. `upload`: starts the copy
        of masks to the device."""
        self._tokenizer, self._eos, self._vocab_size = tokenizer, sorted(eos), vocab_size
        self._mask_width = -(-vocab_size // 32)
        self._threads, self._upload = threads, upload
        self._latest: tuple[list[ref[Constraint] | None], np.ndarray | jax.Array] = [], np.empty(0)
        """The rows that advanced last, and their masks. A lexer is used again once no constraint refers to it."""
        self._compile_cached = lru_cache(MAX_GRAMMARS)(self._compile)
        self._lock = threading.Lock()

    def constrain(self, grammar: str) -> Constraint:
        """Return the constraint of a new sequence; GrammarError if invalid."""
        with self._lock:
            compiled = self._compile_cached(grammar)
        return compiled.constrain()

    def advance(self, rows: List[Constraint | None], tokens: List[List[int]], *, needs_masks: bool = True) -> None:
        """Advance the grammars of a batch by new tokens, and compute their next masks; in one thread at a time.

        None is a row without a grammar. `needs_masks`: otherwise `masks` computes them if they are used after all.
        """
        used = [(row, constraint) for row, constraint in enumerate(rows) if constraint is not None]
        for step in range(max(len(tokens[row]) for row, _ in used)):
            pairs = [(each.matcher, tokens[row][step]) for row, each in used if step < len(tokens[row])]
            self._executor.consume_token_par(pairs)
        self._latest = [], np.empty(0)
        for _, constraint in used:
            constraint.mask_W = None
        if needs_masks:
            masks_BW = self._compute_masks(rows)
            self._latest = [None if each is None else ref(each) for each in rows], self._upload(masks_BW)

    def verify(
        self, rows: List[Constraint | None], tokens: List[List[int]], num_restarts: List[int]
    ) -> list[Verification | None]:
        """Advance the grammars by tokens sampled without masks; compute the next masks of those that reject one."""
        verifications = [
            None if each is None else each.verify(new, restarts, self._eos)
            for each, new, restarts in zip(rows, tokens, num_restarts, strict=True)
        ]
        rejected = [
            (constraint, new[verification.num_accepted])
            for constraint, new, verification in zip(rows, tokens, verifications, strict=True)
            if constraint is not None and verification is not None and verification.is_rejected
        ]
        self._latest = [], np.empty(0)
        if rejected:
            self._compute_masks([constraint for constraint, _ in rejected])
        for constraint, token in rejected:
            if not constraint.error and constraint.allows(token):
                constraint.error = f"token {token} is rejected, although the mask allows it"
        return verifications

    def _compute_masks(self, rows: List[Constraint | None]) -> np.ndarray:
        """Compute the masks [B, W] of the next tokens, of at least one grammar."""
        used = [(row, constraint) for row, constraint in enumerate(rows) if constraint is not None]
        masks_BW = np.empty((len(rows), self._mask_width), np.uint32)
        masks_BW[[row for row, constraint in enumerate(rows) if constraint is None]] = ALL_TOKENS
        # Threads take consecutive entries, so that few of them wait for the same lexer.
        used.sort(key=lambda pair: pair[1].lexer)
        entries = [(constraint.matcher, row) for row, constraint in used]
        self._executor.unsafe_compute_mask_ptr(entries, masks_BW.ctypes.data, masks_BW.strides[0], len(rows))
        for row, constraint in used:
            constraint.mask_W = masks_BW[row]
            if constraint.matcher.is_error():
                constraint.error = str(constraint.matcher.get_error())
        return masks_BW

    def masks(self, rows: List[Constraint | None]) -> np.ndarray | jax.Array:
        """Return the masks [B, W] of the next tokens, on the device if the batch is the one that advanced last."""
        if missing := [each for each in rows if each is not None and each.mask_W is None]:
            self._compute_masks(missing)
        latest, latest_BW = self._latest
        if len(rows) == len(latest) and all(map(operator.is_, rows, (each and each() for each in latest))):
            return latest_BW
        return join_masks(rows, self._mask_width)

    def _compile(self, grammar: str) -> CompiledGrammar:
        library = _library()
        # Outside `compile`, which is timed: a large vocabulary takes longer than a hundred grammars.
        tokenizer = self._library_tokenizer

        def compile() -> Any:
            matcher = library.LLMatcher(tokenizer, grammar, log_level=0)
            _reject_failed(matcher)
            return matcher

        # One thread has no use for several lexers.
        threads = self._threads or (os.cpu_count() or 1) * 8 // 10
        return CompiledGrammar(compile, LEXERS_PER_THREAD * threads if threads > 1 else 1, self._mask_width)

    @cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor(self._threads)

    @cached_property
    def _library_tokenizer(self) -> Any:
        if not self._eos:
            raise GrammarError("structured output needs a tokenizer with an EOS token: set data.tokenizer.eos")
        library = _library()
        wrapper = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos[0], self._vocab_size))
        return library.LLTokenizer(wrapper, eos_token=self._eos)


def join_masks(rows: List[Constraint | None], width: int) -> np.ndarray:
    """Return the masks [B, W] of the next tokens; None is a row without a grammar."""
    masks_BW = np.full((len(rows), width), ALL_TOKENS, np.uint32)
    for row, constraint in enumerate(rows):
        if constraint is not None:
            assert constraint.mask_W is not None
            masks_BW[row] = constraint.mask_W
    return masks_BW


def _reject_failed(matcher: Any) -> None:
    if matcher.is_error():
        raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error().strip()[:500]}")


class _Vocabulary:
    """The tokens of a tokenizer as bytes, in the form that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, eos: int, vocab_size: int):
        """`vocab_size`: of the model; ids that the tokenizer does not have are never allowed."""
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos
        self.special_token_ids = sorted(tokenizer.special)
        names = {id: name for name, id in tokenizer.special_token_ids.items()}
        self.tokens = [
            names[id].encode() if id in names else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)
        ]
        self.tokens += [b""] * (vocab_size - len(self.tokens))
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)
