"""tiktoken: a .tiktoken file of base64 tokens with ranks, or the name of an encoding that tiktoken downloads.

An optional x.tiktoken.json next to x.tiktoken has: {"pattern": regex that splits words, "special_tokens": {text: id},
"bos": text, "eos": text, "pad": text}, all of them optional.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.records import need
from maxhydra.data.tokenizers import (
    blocks,
    character_spans,
    chat_template,
    find_special_tokens,
    report_failures,
    smallest_id_dtype,
    tokenizer_path,
    wrong,
)

# Default pattern that splits words: that of cl100k_base.
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
SETTINGS = ("pattern", "special_tokens", "bos", "eos", "pad")


class TiktokenTokenizer:
    """Tokenizer over a tiktoken encoding, which releases the GIL and is stateless between calls."""

    def __init__(self, config: Config, encoding: Any, special_names: dict[str, str | None], *, has_own_pattern: bool):
        """`has_own_pattern`: its pattern comes from a file, and may skip text that it does not match."""
        self._encoding = encoding
        self.special_token_ids = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        special_tokens = find_special_tokens(config, special_names, self.special_token_ids.get)
        self.bos, self.eos, self.pad = special_tokens.bos, special_tokens.eos, special_tokens.pad
        self.special = frozenset(self.special_token_ids.values())
        # Not every id below n_vocab has a token: an encoding may leave gaps.
        self._text_ids = frozenset(map(encoding.encode_single_token, encoding.token_byte_values()))
        self.vocab_size: int = encoding.n_vocab
        self.chat_template = chat_template(config, None)
        longest = max(len(text) for text in (*encoding.token_byte_values(), *map(str.encode, self.special_token_ids)))
        self.token_widths = np.zeros(self.vocab_size, np.int32)
        self.is_byte_level = True
        for text in encoding.token_byte_values():
            self.token_widths[encoding.encode_single_token(text)] = len(text)
        self.max_token_bytes = None if has_own_pattern else longest

    @report_failures
    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._encoding.encode_ordinary(text)
        return ids

    @report_failures
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int32) for ids in self._encoding.encode_ordinary_batch(list(texts))]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        dtype = smallest_id_dtype(self.vocab_size)
        parts = [ids.astype(dtype) for ids in self.encode_batch(list(blocks(data.decode())))]
        return np.concatenate([np.empty(0, dtype), *parts])

    @report_failures
    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self._encoding.encode(text, allowed_special="all")
        widths = np.array([len(piece) for piece in self._encoding.decode_tokens_bytes(ids)], np.int64)
        return np.array(ids, np.int32), character_spans(text, widths)

    def token_bytes(self, id: int) -> bytes:
        content: bytes = self._encoding.decode_single_token_bytes(id) if id in self._text_ids else b""
        return content

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._encoding.decode([int(id) for id in ids if id in self._text_ids])
        return text


def _ranks(config: Config, path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise wrong(config, "path", f"is not a file of base64 tokens and ranks: {error}", config.path) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise wrong(config, "path", f"has no token for {len(missing)} of the 256 bytes", config.path)
    return ranks


def _settings(config: Config, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise wrong(config, "path", f"{path.name} is not JSON: {error}", config.path) from None
    if not isinstance(settings, dict) or (unknown := [name for name in settings if name not in SETTINGS]):
        reason = f"has unknown keys {', '.join(unknown)}" if isinstance(settings, dict) else "is not a mapping"
        raise wrong(config, "path", f"{path.name} {reason}", config.path, accepted=", ".join(SETTINGS))
    return settings


def input_files(config: Config) -> list[Path]:
    """The file of tokens and its settings; none for the name of an encoding, whose hash the library checks."""
    path = tokenizer_path(config)
    return [path, _settings_path(path)]


def _settings_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.json")


def build(config: Config) -> TiktokenTokenizer:
    assert config.path is not None
    library = need("tiktoken", "data.tokenizer.kind=tiktoken")
    path = tokenizer_path(config)
    if path.is_file():
        settings = _settings(config, _settings_path(path))
        encoding = library.Encoding(
            path.stem,
            pat_str=settings.get("pattern", PATTERN),
            mergeable_ranks=_ranks(config, path),
            special_tokens=settings.get("special_tokens", {}),
        )
        names = {role: settings.get(role) for role in ("bos", "eos", "pad")}
        return TiktokenTokenizer(config, encoding, names, has_own_pattern="pattern" in settings)
    names = library.list_encoding_names()
    if config.path not in names:
        accepted = f"a .tiktoken file, or one of {', '.join(names)}"
        raise wrong(
            config, "path", "is neither a file nor an encoding", config.path, accepted=accepted, hint=nearby_files(path)
        )
    try:
        encoding = library.get_encoding(config.path)
    except Exception as error:  # errors of the download: no network, a proxy, a bad hash
        hint = "download it on a machine with network access and set TIKTOKEN_CACHE_DIR, or use a .tiktoken file"
        raise wrong(config, "path", f"cannot be downloaded ({type(error).__name__})", config.path, hint=hint) from None
    return TiktokenTokenizer(config, encoding, {"eos": "<|endoftext|>"}, has_own_pattern=False)
