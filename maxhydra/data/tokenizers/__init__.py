"""Text to token ids and back. A module of this package is one kind of tokenizer, chosen by data.tokenizer.kind.

Each has `build(config) -> Tokenizer`.
"""

import dataclasses
import importlib
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.rows import RowSpec


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer. Text in, ids out: no begin or end token is added here."""

    vocab_size: int
    bos: int | None
    eos: int | None
    pad: int
    chat_template: str | None
    """Jinja source of the tokenizer's own chat template."""
    special: frozenset[int]
    """Ids that are marks and not text, such as the end of a turn."""
    marks: Mapping[str, int]
    """The special tokens that have a name, by which encode_marked knows them."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text in which the names of special tokens stand for themselves as plain text would."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """The same for many texts, int arrays."""
        ...

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of a whole file, in the smallest type that holds them."""
        ...

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """Ids of a text in which the names of special tokens are those tokens, and [n, 2]: the characters of each."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of some ids; special tokens have none, nor have ids without a token, which a model may draw."""
        ...


def load_tokenizer(data: Data) -> Tokenizer:
    """The tokenizer that the config names."""
    return _built(_Key(data.tokenizer))


@dataclasses.dataclass(frozen=True, eq=False)
class _Key:
    """A tokenizer's config by value: building one may take a second, and every part of a pipeline asks for it."""

    config: Config

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self.config == other.config

    def __hash__(self) -> int:
        return hash(dataclasses.astuple(self.config))


@lru_cache(maxsize=4)
def _built(key: _Key) -> Tokenizer:
    built: Tokenizer = importlib.import_module(f"{__name__}.{key.config.kind}").build(key.config)
    return built


def check_vocabulary(tokenizer: Tokenizer, data: Data, spec: RowSpec) -> None:
    """The model must have a row for every token."""
    if tokenizer.vocab_size > spec.vocab_size:
        reason = f"is under the {tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
        accepted = f"{tokenizer.vocab_size} or more"
        raise ConfigError(Problem("model.vocab_size", reason, value=spec.vocab_size, accepted=accepted))
