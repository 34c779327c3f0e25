"""Plain text files: tokenized into one stream with an end token between files; the end is held out."""

import dataclasses
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data
from maxhydra.data.files import find_files
from maxhydra.data.rows import ContiguousRows, RowSpec
from maxhydra.data.sources import RowSource, named_files
from maxhydra.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer


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
    train = _token_stream(paths, data, spec)
    evaluation = _token_stream(held_out, data, spec)
    return RowSource(
        train=ContiguousRows(train, spec.seq_len, keep_partial=False),
        evaluation=ContiguousRows(evaluation, spec.seq_len, keep_partial=True),
    )


def read_files(paths: list[Path], corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    """Tokenize files in order into one stream, and hold out its end."""
    return split_token_stream(_token_stream(paths, data, spec), spec.seq_len, corpus.eval_fraction)


def split_token_stream(tokens: np.ndarray, seq_len: int, eval_fraction: float) -> RowSource:
    """Hold out the end of a token stream. The first held-out token is a target too, after the last training token."""
    held_out = min(max(1, round(len(tokens) * eval_fraction)), len(tokens))
    boundary = len(tokens) - held_out
    return RowSource(
        train=ContiguousRows(tokens[:boundary], seq_len, keep_partial=False),
        evaluation=ContiguousRows(tokens[max(boundary - 1, 0) :], seq_len, keep_partial=True),
    )


def _token_stream(paths: list[Path], data: Data, spec: RowSpec) -> np.ndarray:
    tokenizer = load_tokenizer(data)
    check_vocabulary(tokenizer, data, spec)
    key = (*((path, path.stat().st_mtime_ns) for path in paths), dataclasses.astuple(data.tokenizer))
    if key not in _cached_streams:
        while len(_cached_streams) > 3:
            _cached_streams.pop(next(iter(_cached_streams)))
        _cached_streams[key] = _tokenize_files(paths, tokenizer)
    return _cached_streams[key]


# The most recently read streams: every evaluation opens its source again.
_cached_streams: dict[tuple, np.ndarray] = {}


def _tokenize_files(paths: list[Path], tokenizer: Tokenizer) -> np.ndarray:
    pieces: list[np.ndarray] = []
    for path in paths:
        try:
            ids = tokenizer.encode_bytes(path.read_bytes())
        except UnicodeDecodeError as error:
            reason = f"is not valid UTF-8: {error}"
            raise ConfigError(Problem("data.path", reason, value=path, hint="convert the file to UTF-8")) from None
        separator = [] if tokenizer.eos is None or not pieces else [np.array([tokenizer.eos], ids.dtype)]
        pieces += [*separator, ids]
    return np.concatenate(pieces)
