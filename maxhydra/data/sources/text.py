"""Your own text files: tokenized into one stream, with an end token after each file but the last, its end held out."""

import dataclasses
from pathlib import Path

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.data import Data, text_files
from maxhydra.data.batch import BatchSpec
from maxhydra.data.rows import Source, split_stream
from maxhydra.data.tokenizers import Tokenizer, tokenizer


def open_source(data: Data, spec: BatchSpec) -> Source:
    assert data.path is not None
    return read_files(text_files(data.path), data, spec)


def read_files(paths: list[Path], data: Data, spec: BatchSpec) -> Source:
    """The stream of some files, in order."""
    words = tokenizer(data)
    if words.vocab_size > spec.vocab_size:
        reason = f"is under the {words.vocab_size} tokens of data.tokenizer.kind={data.tokenizer.kind}"
        accepted = f"{words.vocab_size} or more"
        raise ConfigError(Problem("model.vocab_size", reason, value=spec.vocab_size, accepted=accepted))
    key = (*((path, path.stat().st_mtime_ns) for path in paths), dataclasses.astuple(data.tokenizer))
    if key not in _newest:
        _newest.clear()
        _newest[key] = _read(paths, words)
    return split_stream(_newest[key], spec.seq_len, data.eval_fraction)


# The stream read last: every evaluation opens its source again.
_newest: dict[tuple, np.ndarray] = {}


def _read(paths: list[Path], words: Tokenizer) -> np.ndarray:
    pieces: list[np.ndarray] = []
    for path in paths:
        ids = words.encode_bytes(path.read_bytes())
        pieces += [np.array([words.eos], ids.dtype), ids] if pieces else [ids]
    return np.concatenate(pieces)
