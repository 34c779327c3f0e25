"""Tokenizers: text to token ids and back. One module per kind, chosen by data.tokenizer.kind.

Each module has `build(config) -> Tokenizer`. One that reads files also has `input_files(config)`.
"""

import dataclasses
import importlib
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Data
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.rows import RowSpec
from maxhydra.data.special_tokens import TEMPLATES


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
    built: Tokenizer = importlib.import_module(f"{__name__}.{key.config.kind}").build(key.config)
    return built


def input_files(config: Config) -> list[Path]:
    """Files that the tokenizer reads, apart from a chat template; none if it is built in."""
    find: Callable[[Config], list[Path]]
    find = getattr(importlib.import_module(f"{__name__}.{config.kind}"), "input_files", lambda config: [])
    return [path for path in find(config) if path.is_file()]


def template_files(config: Config) -> list[Path]:
    """The file of the chat template: named by the config, built in, or next to tokenizer.json."""
    path = Path(config.path or "").expanduser()
    beside = (path if path.is_dir() else path.parent) / "chat_template.jinja"
    named = config.chat_template
    paths = [beside] if named is None else [Path(named).expanduser(), TEMPLATES / f"{named}.jinja"]
    return [found for found in paths if found.is_file() and (named is not None or config.kind == "hf")][:1]


def check_vocabulary(tokenizer: Tokenizer, data: Data, spec: RowSpec) -> None:
    """Raise if the model's vocabulary is smaller than the tokenizer's."""
    if tokenizer.vocab_size > spec.vocab_size:
        reason = f"is smaller than the {tokenizer.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
        accepted = f"{tokenizer.vocab_size} or more"
        raise ConfigError(Problem("model.vocab_size", reason, value=spec.vocab_size, accepted=accepted))
