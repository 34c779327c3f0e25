"""Tokenizers: text to token ids and back. One module per kind, chosen by data.tokenizer.kind.

Each module has `build(config) -> Tokenizer`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, wraps
from typing import ParamSpec, Protocol, TypeVar

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.rows import RowSpec

P, T = ParamSpec("P"), TypeVar("T")
# The largest published vocabularies have 300,000 tokens.
MAX_VOCAB_SIZE = 2**24


class Tokenizer(Protocol):
    """Interface of all tokenizers. Text in, ids out: no bos or eos token is added here."""

    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int
    chat_template: str | None
    """Jinja source of the tokenizer's chat template."""
    special: frozenset[int]
    """Ids of special tokens, such as the end of a turn."""
    special_token_ids: Mapping[str, int]
    """Ids of special tokens by name, as `encode_with_special_tokens` recognizes them in text."""

    @property
    def max_token_bytes(self) -> int | None:
        """Longest text of one token, in UTF-8 bytes; None if a token can stand for text of any length."""
        ...

    def encode(self, text: str) -> list[int]:
        """Tokenize a text; names of special tokens in it are plain text."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Tokenize many texts into int arrays."""
        ...

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Tokenize a whole file, into the smallest dtype that holds the ids."""
        ...

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Tokenize a text in which names of special tokens become those tokens; also return character spans [n, 2]."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens and ids without a token, which a model may sample, are omitted."""
        ...


def load_tokenizer(data: Data) -> Tokenizer:
    """Load the tokenizer that the config names; cached."""
    return _load(_Key(data.tokenizer))


@dataclasses.dataclass(frozen=True, eq=False)
class _Key:
    """Cache key of a tokenizer config, by value: loading may take a second, and every part of a pipeline needs it."""

    config: Config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.config == other.config

    def __hash__(self) -> int:
        return hash(dataclasses.astuple(self.config))


@lru_cache(maxsize=4)
def _load(key: _Key) -> Tokenizer:
    module = importlib.import_module(f"{__name__}.{key.config.kind}")
    try:
        built: Tokenizer = module.build(key.config)
        if not 0 < built.vocab_size <= MAX_VOCAB_SIZE:
            raise ValueError(f"its largest token id is {built.vocab_size - 1}; accepted: 0 to {MAX_VOCAB_SIZE - 1}")
    except BaseException as error:  # a damaged file fails anywhere in our code or in that of the library
        if isinstance(error, ConfigError) or not is_failure(error):
            raise
        reason = f"cannot be read as a tokenizer: {describe(error)}"
        raise ConfigError(Problem("data.tokenizer.path", reason, value=key.config.path)) from None
    return built


class TokenizerError(ConfigError):
    """A text on which the tokenizer's library fails, for example because a regex of the tokenizer backtracks."""


def report_failures(method: Callable[P, T]) -> Callable[P, T]:
    """Decorate a method that calls a tokenizer library, so that its failures become TokenizerErrors."""

    @wraps(method)
    def reporting(*args: P.args, **options: P.kwargs) -> T:
        try:
            return method(*args, **options)
        except BaseException as error:
            if isinstance(error, ConfigError) or not is_failure(error):
                raise
            reason = f"the tokenizer failed on a text: {describe(error)}"
            raise TokenizerError(Problem("data.tokenizer.path", reason)) from None

    return reporting


def is_failure(error: BaseException) -> bool:
    """Return True for an exception, or a panic of a library in Rust, which is not an Exception."""
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def describe(error: BaseException) -> str:
    """First line of an error, shortened: it may contain a part of the file."""
    kind = "" if type(error) is Exception else f"{type(error).__name__}: "
    return kind + (str(error).strip().splitlines() or ["no reason given"])[0][:200]


def check_vocabulary(tokenizer: Tokenizer, data: Data, spec: RowSpec) -> None:
    """Raise if the model's vocabulary is smaller than the tokenizer's."""
    if tokenizer.vocab_size > spec.vocab_size:
        reason = f"is smaller than the {tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
        accepted = f"{tokenizer.vocab_size} or more"
        raise ConfigError(Problem("model.vocab_size", reason, value=spec.vocab_size, accepted=accepted))
