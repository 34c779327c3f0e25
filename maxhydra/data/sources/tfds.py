"""Prebuilt TensorFlow Datasets, without TensorFlow.

tfds gives the files and features of a split; the files, ArrayRecord or TFRecord, are read by maxhydra.data.formats, ten
times as fast as by tfds.data_source. Features other than text and lists of numbers are decoded by tfds.
"""

import contextlib
import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.data import Corpus, Data, FileFormat
from maxhydra.data.files import find_files
from maxhydra.data.formats import ConcatRecords, open_files
from maxhydra.data.formats.file_cache import FileCache, Unreadable
from maxhydra.data.formats.payload import decode
from maxhydra.data.records import Record, Records, need
from maxhydra.data.rows import RowSpec
from maxhydra.data.sources import RecordSlice, RecordSource, columns_of, hold_out

SETTING = "data.source=tfds"


def open_source(corpus: Corpus, data: Data, spec: RowSpec) -> RecordSource:
    assert corpus.name is not None
    columns = columns_of(corpus)
    build = find_build(corpus.name, corpus.data_dir)
    train = open_split(build, corpus.split, columns, data.cache)
    if corpus.eval_split is None and corpus.eval_name is None:
        return hold_out(train, corpus.eval_fraction)
    held_out = build if corpus.eval_name is None else find_build(corpus.eval_name, corpus.data_dir)
    evaluation = open_split(held_out, corpus.eval_split or corpus.split, columns, data.cache)
    return RecordSource(train=train, evaluation=evaluation)


def input_files(corpus: Corpus, data: Data) -> dict[str, list[Path]]:
    """All files of the builds; `c4/en:3.0.1` is the folder c4/en/3.0.1 of data_dir."""
    root = Path(corpus.data_dir or "~/tensorflow_datasets").expanduser()
    names = {"name": corpus.name, "eval_name": corpus.eval_name}
    folders = {field: root / name.replace(":", "/") for field, name in names.items() if name is not None}
    return {
        field: sorted(path for path in folder.rglob("*") if path.is_file())
        for field, folder in folders.items()
        if folder.is_dir()
    }


def open_split(build: Any, split: str, columns: tuple[str, ...] | None, cache: str) -> Records:
    """Open the records of a split, or of a slice such as train[:10%]."""
    try:
        instructions = build.splits[split].file_instructions
    except Exception as error:  # split names are parsed, and may be wrong in many ways
        accepted = ", ".join(build.splits)
        raise ConfigError(Problem("data.split", str(error).splitlines()[0], value=split, accepted=accepted)) from None
    file_cache = FileCache(Path(cache).expanduser(), None, _decoder(build.features, columns))
    paths = [find_files(str(part.filename), cache, endings=("",))[0] for part in instructions]
    files = open_files(paths, FileFormat.auto, file_cache)
    return ConcatRecords([_slice_file(file, part) for file, part in zip(files, instructions, strict=True)])


def _slice_file(file: Records, instruction: Any) -> Records:
    """Slice of a file that belongs to a split; an unreadable file stays one bad record."""
    if isinstance(file, Unreadable):
        return file
    stop = len(file) if instruction.take < 0 else min(instruction.skip + instruction.take, len(file))
    return RecordSlice(file, min(instruction.skip, stop), stop)


def find_build(name: str, data_dir: str | None) -> Any:
    """Find a build: its splits and features."""
    library = need("tensorflow_datasets", SETTING)
    try:
        # tfds prints while it searches.
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            build = library.builder(name, data_dir=data_dir, try_gcs=False).info
    except Exception as error:  # a builder is code and may raise anything
        reason = f"cannot be opened: {str(error).strip().splitlines()[0]}"
        raise _not_found(name, data_dir, reason) from None
    if not build.splits:
        raise _not_found(name, data_dir, "has not been built")
    return build


def _not_found(name: str, data_dir: str | None, reason: str) -> ConfigError:
    folder = Path(data_dir or "~/tensorflow_datasets").expanduser()
    builds = sorted(path.name for path in folder.iterdir() if path.is_dir()) if folder.is_dir() else []
    hint = f"data.data_dir={folder} contains {', '.join(builds[:8]) or 'no builds'}"
    return ConfigError(Problem("data.name", reason, value=name, hint=hint))


def _decoder(features: Any, columns: tuple[str, ...] | None) -> Callable[[bytes], Record]:
    """Choose the decoder: our own if every requested column is stored plainly in an Example, else that of tfds."""
    if columns is not None and all(name in features and _is_plain(features[name]) for name in columns):
        return decode

    def decode_features(payload: bytes) -> Record:
        try:
            record: Record = features.deserialize_example_np(payload)
        except Exception as error:  # its parser may raise anything
            raise ValueError(f"is not a record of this build: {error}") from None
        return record

    return decode_features


def _is_plain(feature: Any) -> bool:
    """True for text and for a list of numbers."""
    library = need("tensorflow_datasets", SETTING)
    if isinstance(feature, library.features.Text):
        return True
    if isinstance(feature, library.features.Sequence):
        return _is_number(feature.feature, 0)
    return _is_number(feature, 1)


def _is_number(feature: Any, dimensions: int) -> bool:
    plain = type(feature) is need("tensorflow_datasets", SETTING).features.Tensor
    return plain and len(feature.shape) == dimensions and np.dtype(feature.np_dtype).kind in "iuf"
