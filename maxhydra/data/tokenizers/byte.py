"""One token per byte of UTF-8, then begin, end and padding: no file to load, and any text or binary round-trips."""

from collections.abc import Sequence

import numpy as np

from maxhydra.config.data import Tokenizer as Config


class ByteTokenizer:
    """Ids 0 to 255 are bytes."""

    bos = 256
    eos = 257
    pad = 258
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_bytes(self, data: bytes) -> np.ndarray:
        return np.frombuffer(data, np.uint8).astype(np.uint16)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens have no text; bytes that are not UTF-8 show as the replacement character."""
        return bytes(token for token in ids if token < 256).decode(errors="replace")


def build(config: Config) -> ByteTokenizer:
    return ByteTokenizer()
