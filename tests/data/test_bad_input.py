"""Bad input through the whole pipeline: raise stops with file, index and reason; skip logs them and keeps the rest."""

import gzip
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import Data, OnError, Packing, PackingMethod
from maxhydra.data import BatchSpec, Loader, Row, RowSpec, host_loader, load_tokenizer
from maxhydra.data.files import find_files
from maxhydra.data.formats.payload import decode_arrays, encode_arrays
from tests.support.skips import import_optional

pa = import_optional("pyarrow", extra="data")
pq = import_optional("pyarrow.parquet", extra="data")
RecordWriter = import_optional("tensorboardX.record_writer", extra="tensorboard").RecordWriter

RECORDS = 40


def texts() -> list[str]:
    """Texts of 300 random letters, so that compression leaves bytes of each to damage."""
    random = np.random.default_rng(0)
    return [f"{i:03d} " + "".join(random.choice(list("abcdefghijklmnopqrstuvwxyz"), 300)) for i in range(RECORDS)]


def lines() -> list[bytes]:
    return [json.dumps({"text": text}).encode() for text in texts()]


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 0xFF
    path.write_bytes(content)


def with_line(number: int, line: bytes) -> Callable[[Path], str]:
    def write(folder: Path) -> str:
        changed = lines()
        changed[number] = line
        (folder / "bad.jsonl").write_bytes(b"\n".join(changed))
        return "bad.jsonl"

    return write


def write_arrayrecord(folder: Path, options: str) -> Path:
    path = folder / "bad.array_record"
    writer = ArrayRecordWriter(str(path), options)
    for line in lines():
        writer.write(line)
    writer.close()
    return path


def corrupt_chunk(folder: Path) -> str:
    path = write_arrayrecord(folder, "group_size:1,uncompressed")
    flip(path, path.read_bytes().index(b"017 ") + 100)
    return path.name


def corrupt_group(folder: Path) -> str:
    path = write_arrayrecord(folder, "group_size:4,uncompressed")
    flip(path, path.read_bytes().index(b"017 ") + 100)
    return path.name


def foreign_record(folder: Path) -> str:
    writer = ArrayRecordWriter(str(folder / "bad.array_record"), "group_size:1")
    for i, line in enumerate(lines()):
        writer.write({5: encode_arrays({"tokens": np.arange(9)})[:-3], 6: b"\xff\xff"}.get(i, line))
    writer.close()
    return "bad.array_record"


def damaged_tfrecord(folder: Path, change: Callable[[Path, list[int]], Any]) -> str:
    path = folder / "bad.tfrecord"
    writer, starts, at = RecordWriter(str(path)), [], 0
    for line in lines():
        writer.write(line)
        starts.append(at)
        at += len(line) + 16
    writer.close()
    change(path, starts)
    return path.name


def corrupt_row_group(folder: Path) -> str:
    path = folder / "bad.parquet"
    pq.write_table(
        pa.table({"text": texts()}),
        path,
        row_group_size=10,
        compression="zstd",
        use_dictionary=False,
        write_page_checksum=True,
    )
    column = pq.ParquetFile(path).metadata.row_group(1).column(0)
    flip(path, column.data_page_offset + column.total_compressed_size // 2)
    return path.name


def invalid_utf8_column(folder: Path) -> str:
    """Arrow does not validate text that is declared as UTF-8."""
    payloads = [b"\xff\xfe" if i == 3 else text.encode() for i, text in enumerate(texts())]
    buffers = pa.array(payloads, pa.binary()).buffers()
    column = pa.Array.from_buffers(pa.string(), RECORDS, buffers)
    pq.write_table(pa.table({"text": column}), folder / "bad.parquet")
    return "bad.parquet"


def missing_column(folder: Path) -> str:
    pq.write_table(pa.table({"body": texts()[:3], "url": ["x"] * 3}), folder / "bad.parquet")
    return "bad.parquet"


def cut_gzip(folder: Path) -> str:
    (folder / "bad.jsonl.gz").write_bytes(gzip.compress(b"\n".join(lines()))[:-50])
    return "bad.jsonl.gz"


def cut_arrayrecord(folder: Path) -> str:
    path = write_arrayrecord(folder, "group_size:1")
    path.write_bytes(path.read_bytes()[:-70_000])
    return path.name


ALL = set(range(RECORDS))
CASES: dict[str, tuple[Callable[[Path], str], set[int], int, str, str]] = {
    # function that writes the file; records lost; number of skips; location of the first; reason
    "bad JSON": (with_line(7, b'{"text": "a'), {7}, 1, "line 8", "is not valid JSON: Unterminated string"),
    "no object": (with_line(7, b"[1, 2]"), {7}, 1, "line 8", "expected a JSON object, found list"),
    "invalid UTF-8": (with_line(7, b'{"text": "\xff"}'), {7}, 1, "line 8", "is not valid UTF-8: .*0xff"),
    "half a surrogate": (with_line(7, b'{"text": "\\ud800"}'), {7}, 1, "line 8", "is not valid Unicode"),
    "nested": (with_line(7, b"[" * 100_000), {7}, 1, "line 8", "is not valid JSON: nested too deeply"),
    "no column": (
        with_line(7, b'{"body": "a"}'),
        {7},
        1,
        "line 8",
        "has no column 'text', only 'body'; set data.columns.text",
    ),
    "no text": (with_line(7, b'{"text": 5}'), {7}, 1, "line 8", "expected text, found int"),
    "null": (with_line(7, b'{"text": null}'), {7}, 1, "line 8", "expected text, found NoneType"),
    "long document": (
        with_line(7, b'{"text": "' + b"a" * 10_000_000 + b'"}'),
        {7},
        1,
        "line 8",
        "has 10,000,000 characters, more than data.max_characters=5,000,000",
    ),
    "cut gzip": (cut_gzip, ALL, 1, "the whole file", "cannot be decompressed: "),
    "corrupt chunk": (corrupt_chunk, {17}, 1, "record 17", "chunk data hash mismatch"),
    "corrupt group": (corrupt_group, {16, 17, 18, 19}, 4, "record 16", "chunk data hash mismatch"),
    "foreign records": (foreign_record, {5, 6}, 2, "record 5", "damaged array record|buffer is smaller"),
    "cut ArrayRecord": (cut_arrayrecord, ALL, 1, "the whole file", "not a complete ArrayRecord file"),
    "corrupt payload": (
        lambda folder: damaged_tfrecord(folder, lambda path, starts: flip(path, starts[9] + 40)),
        {9},
        1,
        "record 9",
        "checksum mismatch",
    ),
    "corrupt length": (
        lambda folder: damaged_tfrecord(folder, lambda path, starts: flip(path, starts[9] + 9)),
        set(range(9, RECORDS)),
        1,
        "record 9",
        "truncated or damaged: nothing after byte",
    ),
    "cut TFRecord": (
        lambda folder: damaged_tfrecord(
            folder, lambda path, starts: path.write_bytes(path.read_bytes()[: starts[30] + 20])
        ),
        set(range(30, RECORDS)),
        1,
        "record 30",
        "truncated or damaged",
    ),
    "corrupt row group": (corrupt_row_group, set(range(10, 20)), 10, "row 10", "row group 1 cannot be read"),
    "no UTF-8 in Parquet": (invalid_utf8_column, {3}, 1, "row 3", "is not valid UTF-8: "),
    "no such column": (missing_column, ALL, 3, "row 0", "has no column 'text', only 'body', 'url'"),
}


class SingleProcessSpec(BatchSpec):
    """A spec under which this process holds all rows."""

    def local_rows(self, batch: int) -> np.ndarray:
        return np.arange(batch)


def open_loader(folder: Path, path: str, on_error: str, **values: Any) -> Loader[list[Row]]:
    """Open a loader with one document per row, in the order of the files, with a good file last."""
    good = folder / "good.jsonl"
    good.write_text('{"text": "good 0"}\n{"text": "good 1"}\n')
    data = Data(
        source="grain",
        path=f"{folder / path}; {good}",
        eval_path=str(good),
        on_error=OnError[on_error],
        shuffle=False,
        cache=str(folder / "cache"),
        packing=Packing(method=PackingMethod.none),
        **values,
    )
    spec = RowSpec(seq_len=320, vocab_size=259, seed=0)
    return host_loader(data, SingleProcessSpec(rows=spec, batch=1, sharding=None))  # type: ignore[arg-type]


def read(loader: Loader[list[Row]], count: int) -> list[str]:
    tokenizer = load_tokenizer(Data())
    rows = [next(loader)[0] for _ in range(count)]
    return [tokenizer.decode(row["tokens"][row["weights"] > 0].tolist()) for row in rows]


@pytest.mark.parametrize("case", CASES)
def test_raise_stops_and_says_where(case: str, tmp_path: Path) -> None:
    write, _, _, location, reason = CASES[case]
    name = write(tmp_path)
    loader = open_loader(tmp_path, name, "raise")
    with pytest.raises(ConfigError, match=rf"{tmp_path / name}, {location}: .*({reason})") as error:
        read(loader, RECORDS + 2)
    assert "data.on_error=skip" in str(error.value)
    assert len(str(error.value).splitlines()) == 2
    loader.close()


@pytest.mark.parametrize("case", CASES)
def test_skip_logs_and_all_others_arrive(case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write, lost, times, location, reason = CASES[case]
    name = write(tmp_path)
    expected = [text for i, text in enumerate(texts()) if i not in lost] + ["good 0", "good 1"]
    loader = open_loader(tmp_path, name, "skip", prefetch=0)
    with caplog.at_level(logging.WARNING, "maxhydra"):
        assert read(loader, len(expected)) == expected
        assert loader.metrics()["data/skipped"] == times
        # The next epoch skips the same records.
        assert read(loader, 1) == expected[:1]
    loader.close()
    skipped = [record.getMessage() for record in caplog.records if "skipped" in record.getMessage()]
    assert len(skipped) == 2 * times
    assert skipped[0].startswith(f"skipped {tmp_path / name}, {location}: ")
    assert re.search(reason, skipped[0])


@pytest.mark.parametrize("ending", ["jsonl", "array_record", "tfrecord", "parquet", "jsonl.gz", "blank.jsonl"])
def test_an_empty_file(ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / f"empty.{ending}"
    match ending:
        case "array_record":
            ArrayRecordWriter(str(path), "group_size:1").close()
        case "parquet":
            pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
        case "jsonl.gz":
            path.write_bytes(gzip.compress(b""))
        case "blank.jsonl":
            path.write_bytes(b"\n \n")
        case _:
            path.write_bytes(b"")
    with pytest.raises(ConfigError, match=rf"data\.path={path}: the file has no records"):
        open_loader(tmp_path, path.name, "raise")
    with caplog.at_level(logging.WARNING, "maxhydra"):
        loader = open_loader(tmp_path, path.name, "skip")
        assert read(loader, 2) == ["good 0", "good 1"]
        loader.close()
    assert f"skipped {path}: the file has no records" in caplog.text


@pytest.mark.parametrize("on_error", ["raise", "skip"])
def test_nothing_but_bad_records(on_error: str, tmp_path: Path) -> None:
    """A whole epoch without a row must end in an error, not in an endless search."""
    (tmp_path / "bad.jsonl").write_text("{\n" * 300)
    data = Data(source="grain", path=f"{tmp_path}/bad.jsonl", on_error=OnError[on_error], cache=str(tmp_path / "cache"))
    loader = host_loader(data, SingleProcessSpec(rows=RowSpec(16, 259, 0), batch=1, sharding=None))  # type: ignore[arg-type]
    expected = (
        r"bad\.jsonl, line \d+: is not valid JSON" if on_error == "raise" else "a whole epoch has no usable record"
    )
    with pytest.raises(ConfigError, match=expected):
        next(loader)
    loader.close()


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl", b'{"text": "one record"}\n', "has 1 records, and all are held out for evaluation"),
        ("a.jsonl.gz", b"nonsense", "cannot be decompressed"),
        ("a.parquet", b"nonsense", "not a complete Parquet file"),
    ],
)
def test_a_single_file_that_gives_no_record_says_why(name: str, content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    data = Data(source="grain", path=str(tmp_path / name), cache=str(tmp_path / "cache"))
    with pytest.raises(ConfigError, match=reason):
        next(host_loader(data, SingleProcessSpec(rows=RowSpec(16, 259, 0), batch=1, sharding=None)))  # type: ignore[arg-type]


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:9/x.jsonl", "http://127.0.0.1:9/x.jsonl"])
def test_an_unreachable_server_is_one_message(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("maxhydra.record.storage.FIRST_DELAY", 0.001)
    with pytest.raises(ConfigError, match=r"cannot open|cannot be reached"):
        find_files(url, str(tmp_path), endings=(".jsonl",))


def test_sizes_of_an_array_record_may_not_exceed_memory() -> None:
    """Two dimensions of 2^32 - 1 are more values than an address can count."""
    record = bytearray(encode_arrays({"x": np.zeros((1, 1), np.float32)}))
    at = record.index(b"\x01\x00\x00\x00\x01\x00\x00\x00")
    record[at : at + 8] = b"\xff" * 8
    with pytest.raises(ValueError, match="damaged array record"):
        decode_arrays(bytes(record))
