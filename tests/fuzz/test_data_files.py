"""Data files with random damage: every record is read, or is a BadRecord that names its location."""

import json
import struct
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from hypothesis import example
from hypothesis import strategies as st

from maxhydra.config.schema.data import FileFormat
from maxhydra.data.formats import open_files
from maxhydra.data.formats.file_cache import FileCache
from maxhydra.data.formats.payload import decode, encode_arrays
from maxhydra.data.formats.tfrecord import masked_crc32c
from maxhydra.data.records import BadRecord
from tests.support.fuzzing import fuzz
from tests.support.skips import import_optional

CHANGES = st.lists(st.tuples(st.floats(0, 1), st.none() | st.binary(max_size=8)), min_size=1, max_size=3)
Changes = list[tuple[float, bytes | None]]
RECORDS = [{"text": "one"}, {"text": "twö", "n": [1, 2]}, {"text": "x" * 50}]
PAYLOADS = [json.dumps(record).encode() for record in RECORDS]
ARRAYS = encode_arrays({"tokens": np.arange(9, dtype=np.int32), "weights": np.ones((3, 2), np.float32)})
# A tf.train.Example with the feature text="abc".
EXAMPLE = bytes.fromhex("0a130a110a0474657874120a0a080a06616263c3a9c3a9")[:23]


def damaged(content: bytes, changes: Changes) -> bytes:
    for at, new in changes:
        start = int(at * len(content))
        content = content[:start] + (b"" if new is None else new + content[start + len(new) :])
    return content


def write_jsonl(path: Path) -> None:
    path.write_bytes(b"\n".join(PAYLOADS))


def write_tfrecord(path: Path) -> None:
    parts = []
    for payload in (*PAYLOADS, ARRAYS):
        size = struct.pack("<Q", len(payload))
        sums = [struct.pack("<I", int(masked_crc32c([data])[0])) for data in (size, payload)]
        parts += [size, sums[0], payload, sums[1]]
    path.write_bytes(b"".join(parts))


def write_array_record(path: Path) -> None:
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for payload in PAYLOADS:
        writer.write(payload)
    writer.close()


def write_parquet(path: Path) -> None:
    arrow = import_optional("pyarrow", extra="data")
    parquet = import_optional("pyarrow.parquet", extra="data")
    parquet.write_table(arrow.table({"text": ["one", "two", "x" * 50], "tokens": [[1], [2, 3], []]}), path)


@cache
def whole(write: Callable[[Path], None], path: Path) -> bytes:
    write(path)
    return path.read_bytes()


def read_all(write: Callable[[Path], None], ending: str, changes: Changes, folder: Path) -> None:
    content = whole(write, folder / f"whole{ending}")
    path = folder / f"damaged{ending}"
    path.unlink(missing_ok=True)
    path.write_bytes(damaged(content, changes))
    (records,) = open_files([path], FileFormat.auto, FileCache(folder / "cache", None))
    read = records.read(list(range(min(len(records), 100))))
    assert all(isinstance(record, (dict, BadRecord)) for record in read)
    assert all(record.location and record.reason for record in read if isinstance(record, BadRecord))


@pytest.mark.slow
@fuzz(cases=80, changes=CHANGES)
def test_jsonl(changes: Changes, tmp_path: Path) -> None:
    read_all(write_jsonl, ".jsonl", changes, tmp_path)


@pytest.mark.slow
@fuzz(cases=80, changes=CHANGES)
@example(changes=[(0.0, struct.pack("<Q", 2**63))])
def test_tfrecord(changes: Changes, tmp_path: Path) -> None:
    read_all(write_tfrecord, ".tfrecord", changes, tmp_path)


@fuzz(cases=40, changes=CHANGES)
def test_parquet(changes: Changes, tmp_path: Path) -> None:
    read_all(write_parquet, ".parquet", changes, tmp_path)


@fuzz(cases=20, changes=CHANGES)
def test_array_record(changes: Changes, tmp_path: Path) -> None:
    read_all(write_array_record, ".array_record", changes, tmp_path)


@pytest.mark.slow
@fuzz(cases=300, rejects=(ValueError,), kind=st.sampled_from([ARRAYS, EXAMPLE, PAYLOADS[1]]), changes=CHANGES)
@example(kind=ARRAYS, changes=[(0.4, b"\xff" * 4)])
def test_payload(kind: bytes, changes: Changes) -> None:
    assert isinstance(decode(damaged(kind, changes)), dict)
