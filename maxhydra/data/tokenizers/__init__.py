"""Text to token ids and back. A module of this package is one kind of tokenizer, chosen by data.tokenizer.kind.

Each has `build(config) -> Tokenizer`.
"""

import importlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from maxhydra.config.data import Data


class Tokenizer(Protocol):
    """What the rest of the code asks of a tokenizer."""

    vocab_size: int
    bos: int
    eos: int
    pad: int

    def encode(self, text: str) -> list[int]: ...

    def encode_bytes(self, data: bytes) -> np.ndarray:
        """Ids of a whole file, in the smallest type that holds them."""
        ...

    def decode(self, ids: Sequence[int]) -> str: ...


def tokenizer(data: Data) -> Tokenizer:
    """The tokenizer that the config names."""
    built: Tokenizer = importlib.import_module(f"{__name__}.{data.tokenizer.kind}").build(data.tokenizer)
    return built
