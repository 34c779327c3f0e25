"""Each file format against the library that wrote the file; several files as one; reading from many threads."""

import gzip
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from maxhydra.config import ConfigError
from maxhydra.config.schema.data import FileFormat
from maxhydra.data.formats import ConcatRecords, open_files
from maxhydra.data.formats.file_cache import GROUPS, FileCache, LruCache
from maxhydra.data.formats.payload import encode_arrays, parse_example
from maxhydra.data.formats.tfrecord import crc32c
from maxhydra.data.records import BadRecord, Records
from maxhydra.data.shuffle import ShuffleOrder
from tests.support.skips import import_optional

pa = import_optional("pyarrow", extra="data")
pq = import_optional("pyarrow.parquet", extra="data")
_crc32c = import_optional("tensorboardX.crc32c", extra="tensorboard")._crc32c
RecordWriter = import_optional("tensorboardX.record_writer", extra="tensorboard").RecordWriter


def make_example_class() -> Any:
    """tf.train.Example as a protobuf class, from its published definition."""
    file = descriptor_pb2.FileDescriptorProto(name="example.proto", package="tensorflow", syntax="proto3")
    field = descriptor_pb2.FieldDescriptorProto

    def add(name: str, *fields: tuple[str, int, int, int, str]) -> descriptor_pb2.DescriptorProto:
        message = file.message_type.add(name=name)
        for title, number, label, kind, of in fields:
            message.field.add(name=title, number=number, label=label, type=kind, **({"type_name": of} if of else {}))
        return message

    one, many = field.LABEL_OPTIONAL, field.LABEL_REPEATED
    add("BytesList", ("value", 1, many, field.TYPE_BYTES, ""))
    add("FloatList", ("value", 1, many, field.TYPE_FLOAT, ""))
    add("Int64List", ("value", 1, many, field.TYPE_INT64, ""))
    lists = enumerate(("BytesList", "FloatList", "Int64List"), 1)
    add("Feature", *((of.lower(), i, one, field.TYPE_MESSAGE, f".tensorflow.{of}") for i, of in lists))
    features = add("Features", ("feature", 1, many, field.TYPE_MESSAGE, ".tensorflow.Features.FeatureEntry"))
    entry = features.nested_type.add(name="FeatureEntry")
    entry.options.map_entry = True
    entry.field.add(name="key", number=1, label=one, type=field.TYPE_STRING)
    entry.field.add(name="value", number=2, label=one, type=field.TYPE_MESSAGE, type_name=".tensorflow.Feature")
    add("Example", ("features", 1, one, field.TYPE_MESSAGE, ".tensorflow.Features"))
    # The same lists with each number encoded separately.
    for name, kind in (("LooseFloats", field.TYPE_FLOAT), ("LooseInts", field.TYPE_INT64)):
        add(name, ("value", 1, many, kind, "")).field[0].options.packed = False
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClassesForFiles(["example.proto"], pool)


CLASSES = make_example_class()


def make_example(**features: Any) -> bytes:
    example = CLASSES["tensorflow.Example"]()
    for name, value in features.items():
        feature = example.features.feature[name]
        if isinstance(value, bytes):
            feature.byteslist.value.append(value)
        elif isinstance(value, list):
            feature.byteslist.value.extend(value)
        elif value.dtype.kind == "f":
            feature.floatlist.value.extend(value.tolist())
        else:
            feature.int64list.value.extend(value.tolist())
    serialized: bytes = example.SerializeToString()
    return serialized


def file_cache(folder: Path, columns: tuple[str, ...] | None = None) -> FileCache:
    return FileCache(folder / "cache", columns)


def open_all(paths: list[Path], folder: Path, form: FileFormat = FileFormat.auto) -> Records:
    return ConcatRecords(open_files(paths, form, file_cache(folder)))


def plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray) else value


def same(found: Any, expected: dict[str, Any]) -> bool:
    return {name: plain(value) for name, value in found.items()} == {n: plain(v) for n, v in expected.items()}


def records(count: int, seed: int = 0) -> list[dict[str, Any]]:
    random = np.random.default_rng(seed)
    return [
        {"text": f"{seed}.{i} naïve 日本", "tokens": random.integers(0, 2**31, int(random.integers(0, 9)))}
        for i in range(count)
    ]


class TestExample:
    def test_equals_protobuf(self) -> None:
        features = {
            "text": "日本 é".encode(),
            "several": [b"a", b"", b"ccc" * 100],
            "none": [],
            "one": np.array([7]),
            "numbers": np.array([0, 1, 127, 128, 300, -1, 2**63 - 1, -(2**63), *range(1000, 1400)]),
            "floats": np.array([0.5, -1e30, np.inf], np.float32),
            "": b"no name",
        }
        parsed = parse_example(make_example(**features))
        assert parsed.keys() == features.keys()
        for name, value in features.items():
            assert type(parsed[name]) is type(value)
            np.testing.assert_array_equal(parsed[name], value)

    @pytest.mark.parametrize(("kind", "values"), [("LooseInts", [3, -4, 500]), ("LooseFloats", [0.5, 2.0, -8.0])])
    def test_numbers_that_are_not_packed(self, kind: str, values: list[float]) -> None:
        name = "int64list" if kind == "LooseInts" else "floatlist"
        loose = CLASSES[f"tensorflow.{kind}"](value=values).SerializeToString()
        tight = make_example(x=np.array(values))
        packed = getattr(
            CLASSES["tensorflow.Example"].FromString(tight).features.feature["x"], name
        ).SerializeToString()
        assert len(loose) != len(packed)
        # Concatenating the messages of two writers gives a feature with both kinds of encoding.
        inner = b"".join(bytes([tag, len(body)]) + body for tag, body in [(0x1A if name[0] == "i" else 0x12, loose)])
        entry = b"\x0a\x01x\x12" + bytes([len(inner)]) + inner
        message = b"\x0a" + bytes([len(entry) + 2]) + b"\x0a" + bytes([len(entry)]) + entry
        assert CLASSES["tensorflow.Example"].FromString(message).features.feature["x"].ByteSize()
        assert parse_example(message)["x"].tolist() == values

    def test_damage_is_a_value_error_or_another_example(self) -> None:
        too_large = b"\x0a\x14\x0a\x12\x0a\x01x\x12\x0d\x1a\x0b\x08" + b"\xff" * 9 + b"\x7f"
        with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
            parse_example(too_large)
        whole = make_example(text=b"hello", ids=np.arange(300), f=np.array([1.0]))
        for cut in range(1, len(whole)):
            with pytest.raises(ValueError, match=r"not a tf\.train\.Example"):
                parse_example(whole[:cut])
        random = np.random.default_rng(0)
        for _ in range(2000):
            damaged = bytearray(whole)
            damaged[random.integers(len(whole))] = random.integers(256)
            try:
                parse_example(bytes(damaged))
            except ValueError as error:
                assert "not a tf.train.Example" in str(error)


class TestChecksum:
    def test_known_vectors(self) -> None:
        # RFC 3720, appendix B.4, and the check value of the CRC catalogue.
        up, down = bytes(range(32)), bytes(reversed(range(32)))
        found = crc32c([bytes(32), b"\xff" * 32, up, down, b"123456789", b""])
        assert found.tolist() == [0x8A9136AA, 0x62A8AB43, 0x46DD794E, 0x113FDB5C, 0xE3069283, 0]

    def test_equals_another_implementation(self) -> None:
        random = np.random.default_rng(0)
        payloads = [random.bytes(size) for size in [*range(140), 1000, 4096, 5]]
        assert crc32c(payloads).tolist() == [_crc32c(payload) for payload in payloads]


class TestArrayRecord:
    @pytest.mark.parametrize("options", ["group_size:1", "group_size:1,uncompressed", "group_size:7"])
    def test_any_order(self, options: str, tmp_path: Path) -> None:
        path, created = tmp_path / "a.array_record", records(3000)
        writer = ArrayRecordWriter(str(path), options)
        for i, record in enumerate(created):
            payloads = [
                encode_arrays({"tokens": record["tokens"]}),
                json.dumps({"text": record["text"]}).encode(),
                make_example(text=record["text"].encode(), tokens=record["tokens"]),
            ]
            writer.write(payloads[i % 3])
        writer.close()
        opened = open_all([path], tmp_path)
        assert len(opened) == len(created)
        assert (opened.groups is None) == ("group_size:1" in options)
        assert opened.groups is None or sum(opened.groups) == len(created)
        for index in np.random.default_rng(1).integers(0, len(created), 300).tolist():
            [found] = opened.read([index])
            record = created[index]
            expected = [
                {"tokens": record["tokens"]},
                {"text": record["text"]},
                {"text": record["text"].encode(), "tokens": record["tokens"]},
            ][index % 3]
            assert same(found, expected)


class TestParquet:
    def test_equals_pyarrow(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        table = pa.table(
            {
                "text": [f"t{i}" for i in range(50)],
                "ids": pa.array([random.integers(0, 99, i % 7).tolist() for i in range(50)], pa.list_(pa.int32())),
                "holes": pa.array([[1.5, None] if i % 3 else None for i in range(50)], pa.list_(pa.float32())),
                "messages": [[{"role": "user", "content": str(i)}] for i in range(50)],
                "maybe": pa.array([None if i % 2 else i for i in range(50)], pa.int8()),
            }
        )
        pq.write_table(table, tmp_path / "a.parquet", row_group_size=8)
        opened = open_all([tmp_path / "a.parquet"], tmp_path)
        assert opened.groups == [8] * 6 + [2]
        order = random.permutation(50)
        expected = [table.to_pylist()[i] for i in order.tolist()]
        found = opened.read(order)
        assert all(same(one, other) for one, other in zip(found, expected, strict=True))
        assert isinstance(found[0], dict) and isinstance(found[0]["ids"], np.ndarray)

    def test_only_columns_that_are_needed(self, tmp_path: Path) -> None:
        pq.write_table(pa.table({"text": ["a"], "url": ["b"]}), tmp_path / "a.parquet")
        for columns, names in ((("text",), {"text"}), (("body",), {"text", "url"}), (None, {"text", "url"})):
            [opened] = open_files([tmp_path / "a.parquet"], FileFormat.auto, file_cache(tmp_path, columns))
            [record] = opened.read([0])
            assert isinstance(record, dict) and record.keys() == names

    def test_a_shuffled_epoch_decodes_each_group_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for part in range(3):
            pq.write_table(
                pa.table({"n": range(part * 200, part * 200 + 200)}), tmp_path / f"{part}.parquet", row_group_size=10
            )
        opened = open_all(sorted(tmp_path.glob("*.parquet")), tmp_path)
        decoded: list[tuple[str, int]] = []
        read = pq.ParquetFile.read_row_group

        def counting(file: Any, number: int, **options: Any) -> Any:
            decoded.append((str(file.metadata), number))
            return read(file, number, **options)

        monkeypatch.setattr(pq.ParquetFile, "read_row_group", counting)
        assert opened.groups is not None and len(opened.groups) > GROUPS
        order = ShuffleOrder(len(opened), 0, True, tuple(opened.groups))
        with ThreadPoolExecutor(4) as pool:
            chunks = pool.map(opened.read, [order.indices(0, at, min(at + 16, 600)) for at in range(0, 600, 16)])
            assert sorted(record["n"] for chunk in chunks for record in chunk) == list(range(600))  # type: ignore[index]
        assert len(decoded) == len(opened.groups)


class TestTfRecord:
    def test_what_another_library_wrote(self, tmp_path: Path) -> None:
        created = records(200)
        for name in ("a.tfrecord", "a.tfrecord-00001-of-00002"):
            writer = RecordWriter(str(tmp_path / name))
            for record in created:
                writer.write(make_example(text=record["text"].encode(), tokens=record["tokens"]))
            writer.write(b'{"text": "as JSON"}')
            writer.close()
        opened = open_all(sorted(tmp_path.glob("a.*")), tmp_path)
        assert len(opened) == 402
        order = np.random.default_rng(0).permutation(402)
        for index, found in zip(order.tolist(), opened.read(order), strict=True):
            record = created[index % 201] if index % 201 < 200 else None
            expected = {**record, "text": record["text"].encode()} if record else {"text": "as JSON"}
            assert same(found, expected)


class TestJsonLines:
    TEXT = '\ufeff{"n": 0}\n\n  \t\n{"n": 1}\r\n {"n": 2, "text": "日本\\ud83d\\ude00"}\n\r\n{"n": 3}'

    @pytest.mark.parametrize("ending", ["jsonl", "json", "jsonl.gz"])
    def test_lines(self, ending: str, tmp_path: Path) -> None:
        path = tmp_path / f"a.{ending}"
        payload = self.TEXT.encode()
        path.write_bytes(gzip.compress(payload) if ending.endswith("gz") else payload)
        for _ in range(2):  # the second time from the cached index
            opened = open_all([path], tmp_path)
            assert opened.read([3, 0, 2, 1]) == [{"n": 3}, {"n": 0}, {"n": 2, "text": "日本😀"}, {"n": 1}]
            num_targets = [opened.location(i) for i in range(4)]
            assert num_targets == [f"{path}, line {line}" for line in (1, 4, 5, 7)]
        assert list((tmp_path / "cache").rglob("*.npy"))

    def test_a_gzipped_file_that_is_named_several_times(self, tmp_path: Path) -> None:
        """Opened by several threads at once, none of which finds a decompressed copy yet."""
        path = tmp_path / "a.jsonl.gz"
        path.write_bytes(gzip.compress("".join(f'{{"n": {i}}}\n' for i in range(100_000)).encode(), 1))
        opened = open_all([path] * 8, tmp_path)
        assert len(opened) == 800_000
        assert opened.read(range(99_999, 800_000, 100_000)) == [{"n": 99_999}] * 8
        assert len(list((tmp_path / "cache" / "unpacked").iterdir())) == 1

    def test_a_changed_file_is_read_again(self, tmp_path: Path) -> None:
        path = tmp_path / "a.jsonl"
        for stamp, text in ((1, '{"n": 1}\n'), (2, '{}\n{"n": 2}\n')):
            path.write_text(text)
            os.utime(path, (stamp, stamp))
            opened = open_all([path], tmp_path)
            assert opened.read([len(opened) - 1]) == [{"n": stamp}]

    def test_blocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("maxhydra.data.formats.jsonl.BLOCK", 7)
        path = tmp_path / "a.jsonl"
        path.write_text("".join(f'{{"n": {i}}}\n' for i in range(500)))
        assert open_all([path], tmp_path).read(range(500)) == [{"n": i} for i in range(500)]


class TestFiles:
    def several(self, folder: Path) -> tuple[list[Path], list[int]]:
        """Files of every format; record n has n, in the order of the file names."""
        numbers = iter(range(10_000))

        def some(count: int) -> list[int]:
            return [next(numbers) for _ in range(count)]

        (folder / "a.jsonl").write_text("".join(f'{{"n": {n}}}\n' for n in some(300)))
        pq.write_table(pa.table({"n": some(200)}), folder / "b.parquet", row_group_size=50)
        array, record = (
            ArrayRecordWriter(str(folder / "c.array_record"), "group_size:1"),
            RecordWriter(str(folder / "d.tfrecord")),
        )
        for writer, count in ((array, 150), (record, 100)):
            for n in some(count):
                writer.write(json.dumps({"n": n}).encode())
            writer.close()
        return sorted(folder.glob("[a-d].*")), list(range(750))

    def test_one_index_over_several_formats(self, tmp_path: Path) -> None:
        paths, numbers = self.several(tmp_path)
        opened = open_all(paths, tmp_path)
        assert len(opened) == len(numbers)
        assert opened.groups is not None and sum(opened.groups) == len(numbers)
        order = np.random.default_rng(0).permutation(len(numbers))
        assert [record["n"] for record in opened.read(order)] == order.tolist()  # type: ignore[index]
        for index, location in ((0, "a.jsonl, line 1"), (300, "b.parquet, row 0"), (649, "c.array_record, record 149")):
            assert opened.location(index) == str(tmp_path / location)

    def test_many_threads(self, tmp_path: Path) -> None:
        paths, numbers = self.several(tmp_path)
        opened = open_all(paths, tmp_path)

        def read(seed: int) -> bool:
            order = np.random.default_rng(seed).permutation(len(numbers))
            return [record["n"] for record in opened.read(order)] == order.tolist()  # type: ignore[index]

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(read, range(32)))

    def test_format_by_name_or_by_option(self, tmp_path: Path) -> None:
        (tmp_path / "a.data").write_text('{"n": 1}')
        assert open_all([tmp_path / "a.data"], tmp_path, FileFormat.jsonl).read([0]) == [{"n": 1}]
        with pytest.raises(ConfigError, match=r"a\.data: has an unknown file name ending(?s:.)*jsonl"):
            open_all([tmp_path / "a.data"], tmp_path)

    def test_more_files_than_may_be_open(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("maxhydra.data.formats.file_cache.HANDLES", 3)
        for i in range(20):
            (tmp_path / f"{i:02d}.jsonl").write_text(f'{{"n": {i}}}')
        before = len(os.listdir("/proc/self/fd"))
        opened = open_all(sorted(tmp_path.glob("*.jsonl")), tmp_path)
        assert opened.read(range(20)) == [{"n": i} for i in range(20)]
        assert len(os.listdir("/proc/self/fd")) <= before + 3


class TestLruCache:
    def test_counts_and_weighs(self) -> None:
        cache: LruCache[str] = LruCache(2, 10, len)
        created: list[str] = []

        def get(value: str) -> str:
            return cache.get(value, lambda: created.append(value) or value)  # type: ignore[func-returns-value]

        for value in ("aa", "bb", "cc", "aa", "dddddd", "aa", "bb"):
            assert get(value) == value
        # Of ten letters, all but bb, the least recently used, fit; then cc is evicted for bb.
        assert created == ["aa", "bb", "cc", "dddddd", "bb"]

    def test_a_value_is_created_once(self) -> None:
        cache: LruCache[int] = LruCache(4)
        created: list[int] = []
        ready = threading.Barrier(8)

        def request(_: int) -> int:
            ready.wait()
            return cache.get("key", lambda: created.append(1) or 5)  # type: ignore[func-returns-value]

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(request, range(8))) == {5}
        assert created == [1]


def test_a_file_that_cannot_be_opened_is_one_bad_record(tmp_path: Path) -> None:
    for name in ("a.array_record", "b.parquet", "c.jsonl.gz"):
        (tmp_path / name).write_bytes(b"not what it says" * 9)
    opened = open_all(sorted(tmp_path.glob("[a-c].*")), tmp_path)
    assert len(opened) == 3
    for name, bad_record in zip(("a.array_record", "b.parquet", "c.jsonl.gz"), opened.read(range(3)), strict=True):
        assert (
            isinstance(bad_record, BadRecord)
            and bad_record.location == f"{tmp_path / name}, the whole file"
            and bad_record.reason
        )
