"""Plain text files: tokenized into one stream with an end token between files; the end is held out."""

import dataclasses
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.files import find_files
from maxhydra.data.rows import ContiguousRows, RowSpec
from maxhydra.data.sources import RowSource, named_files
from maxhydra.data.tokenizers import Tokenizer, check_vocabulary, count_token_bytes, load_tokenizer


@dataclasses.dataclass(frozen=True)
class TokenStream:
    """The tokens of files, one after the other."""

    ids: np.ndarray
    byte_ratio: float
    """Bytes of the files over the bytes of their tokens: 1 unless the tokenizer normalizes text."""


def files(corpus: Corpus, data: Data) -> list[Path]:
    """Training files; a part of them is held out unless there are evaluation files."""
    assert corpus.path is not None
    return find_files(corpus.path, data.cache, endings=(".txt",))


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    return named_files(corpus, data, (".txt",))


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    paths = files(corpus, data)
    if corpus.eval_path is None:
        return read_files(paths, corpus, data, spec)
    held_out = find_files(corpus.eval_path, data.cache, endings=(".txt",))
    train, evaluation = _token_stream(paths, data, spec), _token_stream(held_out, data, spec)
    return RowSource(
        train=ContiguousRows(train.ids, spec.seq_len, keep_partial=False),
        evaluation=_evaluation_rows(evaluation, 0, data, spec),
    )


def read_files(paths: list[Path], corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    """Tokenize files in order into one stream, and hold out its end."""
    stream = _token_stream(paths, data, spec)
    held_out = min(max(1, round(len(stream.ids) * corpus.eval_fraction)), len(stream.ids))
    boundary = len(stream.ids) - held_out
    return RowSource(
        train=ContiguousRows(stream.ids[:boundary], spec.seq_len, keep_partial=False),
        # The first held-out token is a target too, after the last training token.
        evaluation=_evaluation_rows(stream, max(boundary - 1, 0), data, spec),
    )


def _evaluation_rows(stream: TokenStream, start: int, data: Data, spec: RowSpec) -> ContiguousRows:
    """Rows of the tokens from `start` on, with the bytes of their text."""
    tokenizer, ids = load_tokenizer(data), stream.ids[start:]
    text_bytes = round(int(tokenizer.token_widths[ids].sum(dtype=np.int64)) * stream.byte_ratio)
    token_bytes = count_token_bytes(tokenizer, ids, text_bytes)
    return ContiguousRows(ids, spec.seq_len, keep_partial=True, token_bytes=token_bytes)


def _token_stream(paths: list[Path], data: Data, spec: RowSpec) -> TokenStream:
    tokenizer = load_tokenizer(data)
    check_vocabulary(tokenizer, data, spec)
    key = (*((path, path.stat().st_mtime_ns) for path in paths), dataclasses.astuple(data.tokenizer))
    if key not in _cached_streams:
        while len(_cached_streams) > 3:
            _cached_streams.pop(next(iter(_cached_streams)))
        _cached_streams[key] = _tokenize_files(paths, tokenizer)
    return _cached_streams[key]


# The most recently read streams: every evaluation opens its source again.
_cached_streams: dict[tuple, TokenStream] = {}


def _tokenize_files(paths: list[Path], tokenizer: Tokenizer) -> TokenStream:
    pieces: list[np.ndarray] = []
    text_bytes = token_bytes = 0
    for path in paths:
        content = path.read_bytes()
        text_bytes += len(content)
        try:
            ids = tokenizer.encode_bytes(content)
        except UnicodeDecodeError as error:
            reason = f"is not valid UTF-8: {error}"
            raise ConfigError(Problem("data.path", reason, value=path, hint="convert the file to UTF-8")) from None
        token_bytes += int(tokenizer.token_widths[ids].sum(dtype=np.int64))
        separator = [] if tokenizer.eos is None or not pieces else [np.array([tokenizer.eos], ids.dtype)]
        pieces += [*separator, ids]
    return TokenStream(np.concatenate(pieces), text_bytes / max(1, token_bytes))
