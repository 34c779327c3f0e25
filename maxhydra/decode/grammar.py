"""Structured output: a grammar restricts the tokens of a completion, with masks that llguidance computes.

A mask depends on all tokens before it. So a batch with such sequences is decoded in single steps: the next forward call
is dispatched, the tokens of the previous one are read, and a worker thread computes the masks while the device runs.

B rows, W words of 32 bits, one bit per token of the vocabulary.
"""

import threading
from collections.abc import Collection, Mapping
from collections.abc import Sequence as List
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from maxhydra.data import Tokenizer
from maxhydra.decode.request import RequestRejectedError

# Compiled grammars that are kept; clients mostly repeat a few schemas.
MAX_GRAMMARS = 128
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


class Constraint:
    """The grammar of one sequence, after the tokens that it has generated."""

    def __init__(self, matcher: Any):
        self.matcher = matcher
        self.masks: tuple[Future[np.ndarray], int] | None = None
        """Masks of several sequences that are being computed, and the row of this one."""

    def mask(self) -> np.ndarray:
        """Wait for the mask [W] of the next token."""
        assert self.masks is not None
        future, row = self.masks
        masks_BW: np.ndarray = future.result()
        return masks_BW[row]

    @property
    def error(self) -> str:
        """Why no mask could be computed, for example a limit of the parser; call it after `mask`."""
        return str(self.matcher.get_error())


class GrammarCompiler:
    """Compiles the grammars of an engine, and computes masks in a worker thread. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, *, eos: Collection[int], vocab_size: int):
        self._tokenizer, self._eos = tokenizer, sorted(eos)
        self.mask_width = -(-vocab_size // 32)
        self._compile_cached = lru_cache(MAX_GRAMMARS)(self._compile)
        self._lock = threading.Lock()
        self._worker = ThreadPoolExecutor(1, "masks")

    def constrain(self, grammar: str) -> Constraint:
        """Return the constraint of a new sequence, whose first mask is being computed; GrammarError if invalid."""
        with self._lock:
            constraint = Constraint(self._compile_cached(grammar).deep_copy())
        self.advance([constraint], [[]])
        return constraint

    def advance(self, constraints: List[Constraint], tokens: List[List[int]]) -> None:
        """Start to compute the masks after new tokens of these sequences."""
        future = self._worker.submit(self._compute, constraints, tokens)
        for row, constraint in enumerate(constraints):
            constraint.masks = future, row

    def close(self) -> None:
        self._worker.shutdown(cancel_futures=True)

    def _compute(self, constraints: List[Constraint], tokens: List[List[int]]) -> np.ndarray:
        matchers = [constraint.matcher for constraint in constraints]
        for matcher, new in zip(matchers, tokens, strict=True):
            matcher.consume_tokens(list(new))
        own_width = -(-self._library_tokenizer.vocab_size // 32)
        masks_BW = np.zeros((len(matchers), self.mask_width), np.uint32)
        own = np.zeros((len(matchers), own_width), np.int32)
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._executor.unsafe_compute_mask_ptr(rows, own.ctypes.data, 4 * own_width, len(rows))
        masks_BW[:, :own_width] = own.view(np.uint32)
        return masks_BW

    def _compile(self, grammar: str) -> Any:
        library = _library()
        matcher = library.LLMatcher(self._library_tokenizer, grammar, log_level=0)
        if matcher.is_error():
            raise GrammarError(f"the grammar cannot be compiled: {matcher.get_error().strip()[:500]}")
        return matcher

    @cached_property
    def _executor(self) -> Any:
        return _library().LLExecutor()

    @cached_property
    def _library_tokenizer(self) -> Any:
        if not self._eos:
            raise GrammarError("structured output needs a tokenizer with an EOS token: set data.tokenizer.eos")
        library = _library()
        wrapper = library.TokenizerWrapper(_Vocabulary(self._tokenizer, self._eos[0]))
        return library.LLTokenizer(wrapper, eos_token=self._eos)


class _Vocabulary:
    """The tokens of a tokenizer as bytes, in the form that llguidance expects."""

    def __init__(self, tokenizer: Tokenizer, eos: int):
        self.eos_token_id, self.bos_token_id = eos, tokenizer.bos
        self.special_token_ids = sorted(tokenizer.special)
        names = {id: name for name, id in tokenizer.special_token_ids.items()}
        self.tokens = [
            names[id].encode() if id in names else tokenizer.token_bytes(id) for id in range(tokenizer.vocab_size)
        ]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes | str) -> list[int]:
        return self._tokenizer.encode(text.decode(errors="replace") if isinstance(text, bytes) else text)
