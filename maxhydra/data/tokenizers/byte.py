"""One token per byte of UTF-8, then begin, end and padding: no file to load, and any text or binary round-trips."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from maxhydra.config.tokenizer import Tokenizer as Config
from maxhydra.data.vocabulary import chat_template


class ByteTokenizer:
    """Ids 0 to 255 are bytes."""

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259
    special = frozenset({bos, eos, pad})
    marks: Mapping[str, int] = MappingProxyType({})

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """No special token has a name, so a template's marks are plain bytes."""
        widths = [len(letter.encode()) for letter in text]
        character = np.repeat(np.arange(len(text)), widths)
        return np.frombuffer(text.encode(), np.uint8).astype(np.int32), np.stack([character, character + 1], 1)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens have no text; bytes that are not UTF-8 show as the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def build(config: Config) -> ByteTokenizer:
    return ByteTokenizer(chat_template(config, None))
