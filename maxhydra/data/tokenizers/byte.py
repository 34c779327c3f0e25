"""Byte-level tokenizer: one token per UTF-8 byte, plus bos, eos and pad. It needs no file, and any text round-trips."""

import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data.tokenizers import chat_template


class ByteTokenizer:
    """Ids 0 to 255 are bytes."""

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259
    special = frozenset({bos, eos, pad})
    special_token_ids: Mapping[str, int] = MappingProxyType({"<|begin|>": bos, "<|end|>": eos, "<|pad|>": pad})

    max_token_bytes = max(map(len, special_token_ids))
    token_widths = (np.arange(vocab_size) < bos).astype(np.int32)
    is_byte_level = True

    def __init__(self, chat_template: str | None = None):
        self.chat_template = chat_template

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        for piece in PIECES.finditer(text):
            special_id = self.special_token_ids.get(piece[0])
            piece_ids = list(piece[0].encode()) if special_id is None else [special_id]
            ids += piece_ids
            spans += [piece.span()] * len(piece_ids)
        return np.array(ids, np.int32), np.array(spans, np.int64).reshape(-1, 2)

    def token_bytes(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text; special tokens are omitted, and invalid UTF-8 becomes the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


# A special token's name, or one character.
PIECES = re.compile("|".join([*map(re.escape, ByteTokenizer.special_token_ids), "."]), re.DOTALL)


def build(config: Config) -> ByteTokenizer:
    return ByteTokenizer(chat_template(config, None))
