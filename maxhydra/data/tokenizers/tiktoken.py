"""tiktoken: a .tiktoken file of base64 tokens with their ranks, or the name of an encoding that tiktoken downloads.

Beside x.tiktoken may lie x.tiktoken.json: {"pattern": regex that splits words, "special_tokens": {text: id},
"bos": text, "eos": text, "pad": text}, all of them optional.
"""

import base64
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config.paths import beside
from maxhydra.config.schema.tokenizer import Tokenizer as Config
from maxhydra.data.optional_packages import need
from maxhydra.data.special_tokens import blocks, character_spans, chat_template, find_special_tokens, smallest, wrong

# How words are split where the file beside does not say: as cl100k_base does.
PATTERN = (
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|"""
    r"""\s++$|\s*[\r\n]|\s+(?!\S)|\s"""
)
SETTINGS = ("pattern", "special_tokens", "bos", "eos", "pad")


class TiktokenTokenizer:
    """The protocol over a tiktoken encoding, which releases the interpreter lock and keeps no state between calls."""

    def __init__(self, config: Config, encoding: Any, ends: dict[str, str | None]):
        self._tokenizer = encoding
        self.marks = {name: encoding.encode_single_token(name) for name in encoding.special_tokens_set}
        found = find_special_tokens(config, ends, self.marks.get)
        self.bos, self.eos, self.pad = found.bos, found.eos, found.pad
        self.special = frozenset(self.marks.values())
        # Not all ids up to n_vocab: an encoding may leave some out.
        self._texts = frozenset(map(encoding.encode_single_token, encoding.token_byte_values()))
        self.vocab_size: int = encoding.n_vocab
        self.chat_template = chat_template(config, None)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode_ordinary(text)
        return ids

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(ids, np.int32) for ids in self._tokenizer.encode_ordinary_batch(list(texts))]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        kind = smallest(self.vocab_size)
        parts = [ids.astype(kind) for ids in self.encode_batch(list(blocks(data.decode())))]
        return np.concatenate([np.empty(0, kind), *parts])

    def encode_marked(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self._tokenizer.encode(text, allowed_special="all")
        widths = np.array([len(piece) for piece in self._tokenizer.decode_tokens_bytes(ids)], np.int64)
        return np.array(ids, np.int32), character_spans(text, widths)

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode([int(id) for id in ids if id in self._texts])
        return text


def _ranks(config: Config, path: Path) -> dict[bytes, int]:
    try:
        lines = [line.split() for line in path.read_bytes().splitlines() if line]
        ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    except ValueError as error:
        raise wrong(config, "path", f"is no file of base64 tokens and ranks: {error}", config.path) from None
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise wrong(config, "path", f"has no token for {len(missing)} of the 256 bytes", config.path)
    return ranks


def _settings(config: Config, path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise wrong(config, "path", f"{path.name} is not JSON: {error}", config.path) from None
    if not isinstance(found, dict) or (unknown := [name for name in found if name not in SETTINGS]):
        named = f"has {', '.join(unknown)}" if isinstance(found, dict) else "is no mapping"
        raise wrong(config, "path", f"{path.name} {named}", config.path, accepted=", ".join(SETTINGS))
    return found


def build(config: Config) -> TiktokenTokenizer:
    assert config.path is not None
    library = need("tiktoken", "data.tokenizer.kind=tiktoken")
    path = Path(config.path).expanduser()
    if path.is_file():
        settings = _settings(config, path.with_name(f"{path.name}.json"))
        encoding = library.Encoding(
            path.stem,
            pat_str=settings.get("pattern", PATTERN),
            mergeable_ranks=_ranks(config, path),
            special_tokens=settings.get("special_tokens", {}),
        )
        return TiktokenTokenizer(config, encoding, {role: settings.get(role) for role in ("bos", "eos", "pad")})
    names = library.list_encoding_names()
    if config.path not in names:
        accepted = f"a .tiktoken file, or one of {', '.join(names)}"
        raise wrong(config, "path", "is no file and no encoding", config.path, accepted=accepted, hint=beside(path))
    try:
        encoding = library.get_encoding(config.path)
    except Exception as error:  # the download's own errors: no network, a proxy, a bad hash
        hint = "fetch it where there is a network and set TIKTOKEN_CACHE_DIR, or give a .tiktoken file"
        raise wrong(config, "path", f"cannot be fetched ({type(error).__name__})", config.path, hint=hint) from None
    return TiktokenTokenizer(config, encoding, {"eos": "<|endoftext|>"})
