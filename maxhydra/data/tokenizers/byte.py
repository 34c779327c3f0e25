"""One token per byte of UTF-8, then begin, end and padding: no file to load, and any text or binary round-trips."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.special_tokens import chat_template


class ByteTokenizer:
    """Ids 0 to 255 are bytes."""

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259
    special = frozenset({bos, eos, pad})
    marks: Mapping[str, int] = MappingProxyType({"<|begin|>": bos, "<|end|>": eos, "<|pad|>": pad})

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece in PIECES.finditer(text):
            mark = self.marks.get(piece[0])
            own = list(piece[0].encode()) if mark is None else [mark]
            ids += own
            spans += [piece.span()] * len(own)
        return np.array(ids, np.int32), np.array(spans, np.int64).reshape(-1, 2)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens have no text; bytes that are not UTF-8 show as the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


# A special token's name, or one character.
PIECES = re.compile("|".join([*map(re.escape, ByteTokenizer.marks), "."]), re.DOTALL)


def build(config: Config) -> ByteTokenizer:
    return ByteTokenizer(chat_template(config, None))
