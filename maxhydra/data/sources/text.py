"""Your own text files: tokenized into one stream, with an end token after each file but the last, its end held out."""

import dataclasses
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.corpus import Corpus
from maxhydra.config.schema.data import Data
from maxhydra.data.files import find_files
from maxhydra.data.rows import ContiguousRows, RowSpec
from maxhydra.data.sources import RowSource
from maxhydra.data.tokenizers import Tokenizer, check_vocabulary, load_tokenizer


def files(corpus: Corpus, data: Data) -> list[Path]:
    """The files to train on, of which a part is held out where there are none to evaluate on."""
    assert corpus.path is not None
    return find_files(corpus.path, data.cache, endings=(".txt",))


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    paths = files(corpus, data)
    if corpus.eval_path is None:
        return read_files(paths, corpus, data, spec)
    held_out = find_files(corpus.eval_path, data.cache, endings=(".txt",))
    train = _stream(paths, data, spec)
    evaluation = _stream(held_out, data, spec)
    return RowSource(
        train=ContiguousRows(train, spec.seq_len, keep_partial=False),
        evaluation=ContiguousRows(evaluation, spec.seq_len, keep_partial=True),
    )


def read_files(paths: list[Path], corpus: Corpus, data: Data, spec: RowSpec) -> RowSource:
    """The stream of some files, in order."""
    return split_stream(_stream(paths, data, spec), spec.seq_len, corpus.eval_fraction)


def split_stream(tokens: np.ndarray, seq_len: int, eval_fraction: float) -> RowSource:
    """Hold out the end of a stream. The first held-out token is predicted too, from the last one of training."""
    held_out = min(max(1, round(len(tokens) * eval_fraction)), len(tokens))
    boundary = len(tokens) - held_out
    return RowSource(
        train=ContiguousRows(tokens[:boundary], seq_len, keep_partial=False),
        evaluation=ContiguousRows(tokens[max(boundary - 1, 0) :], seq_len, keep_partial=True),
    )


def _stream(paths: list[Path], data: Data, spec: RowSpec) -> np.ndarray:
    tokenizer = load_tokenizer(data)
    check_vocabulary(tokenizer, data, spec)
    key = (*((path, path.stat().st_mtime_ns) for path in paths), dataclasses.astuple(data.tokenizer))
    if key not in _newest:
        while len(_newest) > 3:
            _newest.pop(next(iter(_newest)))
        _newest[key] = _read(paths, tokenizer)
    return _newest[key]


# The streams read last: every evaluation opens its source again.
_newest: dict[tuple, np.ndarray] = {}


def _read(paths: list[Path], tokenizer: Tokenizer) -> np.ndarray:
    pieces: list[np.ndarray] = []
    for path in paths:
        try:
            ids = tokenizer.encode_bytes(path.read_bytes())
        except UnicodeDecodeError as error:
            reason = f"is not UTF-8: {error}"
            raise ConfigError(Problem("data.path", reason, value=path, hint="convert the file to UTF-8")) from None
        between = [] if tokenizer.eos is None or not pieces else [np.array([tokenizer.eos], ids.dtype)]
        pieces += [*between, ids]
    return np.concatenate(pieces)
