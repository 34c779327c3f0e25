"""SentencePiece .model files.

A SentencePiece model recognizes user-defined symbols in any text. Those that the chat template uses, such as the end of
a turn, are made control symbols here, which text cannot produce; the others (runs of newlines, for instance) stay text.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.values import nearby_files
from maxhydra.data.records import need
from maxhydra.data.tokenizers import (
    blocks,
    chat_template,
    find_special_tokens,
    report_failures,
    smallest_id_dtype,
    special_token_pattern,
    tokenizer_path,
    width_of_piece,
    wrong,
)


class SentencePieceTokenizer:
    """Tokenizer over a SentencePiece processor, which is stateless between calls."""

    def __init__(self, config: Config, content: bytes):
        library = need("sentencepiece", "data.tokenizer.kind=sentencepiece")
        schema = need("sentencepiece.sentencepiece_model_pb2", "data.tokenizer.kind=sentencepiece").ModelProto
        self.chat_template = chat_template(config, None)
        model = schema()
        model.ParseFromString(content)
        ids = {piece.piece: id for id, piece in enumerate(model.pieces)}
        names = {"bos": model.trainer_spec.bos_piece, "eos": model.trainer_spec.eos_piece}
        names["pad"] = model.trainer_spec.pad_piece
        special_tokens = find_special_tokens(
            config, {role: name if name in ids else None for role, name in names.items()}, ids.get
        )
        self.bos, self.eos, self.pad = special_tokens.bos, special_tokens.eos, special_tokens.pad
        kinds = schema.SentencePiece
        for id, piece in enumerate(model.pieces):
            if id in (special_tokens.bos, special_tokens.eos) or (
                piece.type == kinds.USER_DEFINED and self._is_in_template(piece.piece)
            ):
                piece.type = kinds.CONTROL
        self.vocab_size = len(model.pieces)
        self.special_token_ids = {piece: id for piece, id in ids.items() if model.pieces[id].type == kinds.CONTROL}
        self.special = frozenset(self.special_token_ids.values())
        self._pattern = special_token_pattern(self.special_token_ids)
        self._processor = library.SentencePieceProcessor(model_proto=model.SerializeToString())
        # Normalization can remove text, and an unknown word of any length is one token.
        is_exact = model.normalizer_spec.name == "identity" and model.trainer_spec.byte_fallback
        is_exact = is_exact and not model.normalizer_spec.remove_extra_whitespaces
        self.max_token_bytes = max(len(piece.encode()) for piece in ids) if is_exact else None
        unknown = {id for id, piece in enumerate(model.pieces) if piece.type == kinds.UNKNOWN}
        widths = [0 if id in self.special | unknown else width_of_piece(piece) for piece, id in ids.items()]
        self.token_widths = np.array(widths, np.int32)
        self.is_byte_level = False
        # Text after a special token is in the middle of the whole, so no space is put before it.
        model.normalizer_spec.add_dummy_prefix = False
        self._continuation = library.SentencePieceProcessor(model_proto=model.SerializeToString())

    def _is_in_template(self, name: str) -> bool:
        return self.chat_template is not None and name[:1] in ("<", "[") and name in self.chat_template

    @report_failures
    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._processor.encode(text)
        return ids

    @report_failures
    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        batch: list[Any] = self._processor.encode(list(texts))
        return [np.array(ids, np.int32) for ids in batch]

    def encode_bytes(self, data: bytes) -> np.ndarray:
        dtype = smallest_id_dtype(self.vocab_size)
        parts = [ids.astype(dtype) for ids in self.encode_batch(list(blocks(data.decode())))]
        return np.concatenate([np.empty(0, dtype), *parts])

    @report_failures
    def encode_with_special_tokens(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        at = 0
        for match in self._pattern.finditer(text) if self._pattern else ():
            self._append(text, at, match.start(), (ids, spans))
            ids.append(self.special_token_ids[match[0]])
            spans.append(match.span())
            at = match.end()
        self._append(text, at, len(text), (ids, spans))
        return np.array(ids, np.int32), np.array(spans, np.int64).reshape(-1, 2)

    def _append(self, text: str, start: int, end: int, output: tuple[list[int], list[tuple[int, int]]]) -> None:
        """Append the ids and spans of a part of the text that has no special tokens."""
        if start < end:
            processor = self._continuation if start else self._processor
            mapping = processor.encode_as_offset_mapping(text[start:end])
            output[0].extend(mapping["ids"])
            output[1].extend((start + first, start + last) for first, last in mapping["offsets"])

    def token_bytes(self, id: int) -> bytes:
        if id in self.special or id >= self.vocab_size or self._processor.is_unknown(id):
            return b""
        piece: str = self._processor.id_to_piece(id)
        return bytes([int(piece[3:5], 16)]) if self._processor.is_byte(id) else piece.replace("▁", " ").encode()

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._processor.decode([int(id) for id in ids if id < self.vocab_size and id not in self.special])
        return text


def input_files(config: Config) -> list[Path]:
    return [tokenizer_path(config)]


def build(config: Config) -> SentencePieceTokenizer:
    assert config.path is not None
    path = tokenizer_path(config)
    if not path.is_file():
        raise wrong(config, "path", "no such file", config.path, accepted="a .model file", hint=nearby_files(path))
    message = need("google.protobuf.message", "data.tokenizer.kind=sentencepiece")
    try:
        return SentencePieceTokenizer(config, path.read_bytes())
    except (RuntimeError, ValueError, TypeError, IndexError, message.DecodeError) as error:
        raise wrong(config, "path", f"is not a SentencePiece model: {error}", config.path) from None
