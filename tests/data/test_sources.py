"""Sources against the libraries they are based on (datasets, tfds, NumPy); files by path, pattern and URL."""

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import NAMED, Data
from maxhydra.config.schema.hardware import RULES, Mesh
from maxhydra.data import BatchSpec, RowSpec, eval_batches
from maxhydra.data.files import find_files
from maxhydra.data.pipeline import Pipeline
from maxhydra.data.records import Cursor, Records
from maxhydra.data.sources import RecordSource, RowSource, Source, StreamSource, open_source
from maxhydra.data.sources.hf import HfStream
from maxhydra.data.sources.olmo import is_repetitive
from maxhydra.sharding import Sharder, build_mesh
from tests.support.skips import import_optional
from tests.support.tfds_builds import build_c4, build_letters, build_olmo

datasets = import_optional("datasets", extra="data")
pa = import_optional("pyarrow", extra="data")
pq = import_optional("pyarrow.parquet", extra="data")
tfds = import_optional("tensorflow_datasets", extra="data")

SPEC = RowSpec(seq_len=16, vocab_size=100_000, seed=1)


def opened(folder: Path, spec: RowSpec = SPEC, **values: Any) -> Source:
    data = Data(cache=str(folder / "cache"), **values)
    assert not list(data.check())
    return open_source(data, data, spec)


def all_of(records: Records) -> list[Any]:
    return records.read(range(len(records)))


def texts(records: Records) -> list[str]:
    return [record["text"] for record in all_of(records)]


def write_lines(path: Path, values: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": value}) + "\n" for value in values))
    return path


class TestGrain:
    def test_paths_patterns_and_urls(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "in" / "a.jsonl", ["a0", "a1"])
        write_lines(tmp_path / "in" / "sub" / "b.jsonl", ["b0"])
        pq.write_table(pa.table({"text": ["c0", "c1"]}), tmp_path / "in" / "c.parquet")
        (tmp_path / "in" / "dataset_info.json").write_text("{}")
        for part in range(2):
            writer = ArrayRecordWriter(str(tmp_path / "in" / f"d.array_record-0000{part}-of-00002"), "group_size:1")
            writer.write(json.dumps({"text": f"d{part}"}).encode())
            writer.close()
        memory = fsspec.filesystem("memory")
        memory.pipe("/corpus/m.jsonl", b'{"text": "m0"}\n{"text": "m1"}\n')
        everything = ["a0", "a1", "c0", "c1", "d0", "d1", "b0"]
        root = tmp_path / "in"
        for path, expected in {
            f"{root}": everything,
            f"{root}/a.jsonl": ["a0", "a1"],
            f"{root}/*.jsonl; {root}/sub": ["a0", "a1", "b0"],
            f"{root}/d.*": ["d0", "d1"],
            f"{root}/**/*.jsonl": ["a0", "a1", "b0"],
            f"file://{root}/*.jsonl": ["a0", "a1"],
            f"file://{root}": everything,
            "memory://corpus/*.jsonl": ["m0", "m1"],
            "memory://corpus": ["m0", "m1"],
        }.items():
            source = opened(tmp_path, source="grain", path=path, eval_path=f"{root}/sub")
            assert isinstance(source, RecordSource)
            assert texts(source.train) == expected, path
            assert texts(source.evaluation) == ["b0"]

    def test_the_end_is_held_out(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "a.jsonl", [str(i) for i in range(10)])
        source = opened(tmp_path, source="grain", path=f"{tmp_path}/a.jsonl", eval_fraction=0.2)
        assert isinstance(source, RecordSource)
        assert texts(source.train) == [str(i) for i in range(8)] and texts(source.evaluation) == ["8", "9"]

    def test_a_missing_file_lists_nearby_files(self, tmp_path: Path) -> None:
        write_lines(tmp_path / "near.jsonl", ["x"])
        for name in ("neat.jsonl", "*.parquet", "deep/er/x.jsonl"):
            [problem] = Data(source="grain", path=f"{tmp_path}/{name}").check()
            assert problem.path == "path" and "file" in problem.reason and "near.jsonl" in problem.hint
            with pytest.raises(ConfigError, match=r"no such file(?s:.)*near\.jsonl"):
                find_files(f"{tmp_path}/{name}", str(tmp_path / "cache"), endings=(".jsonl",))
        for url in ("memory://nothing/*.jsonl", f"file://{tmp_path}/no.jsonl"):
            with pytest.raises(ConfigError, match="no such file"):
                opened(tmp_path, source="grain", path=url)
        with pytest.raises(ConfigError, match="nosuch"):
            opened(tmp_path, source="grain", path="nosuch://x/y.jsonl")


class TestHf:
    @pytest.fixture
    def table(self) -> datasets.Dataset:
        random = np.random.default_rng(0)
        rows = [{"text": f"t{i}", "ids": random.integers(0, 9, i % 5).tolist(), "n": i} for i in range(40)]
        return datasets.Dataset.from_list(rows)

    @pytest.mark.parametrize("kind", ["json", "parquet", "csv", "arrow", "saved", "splits"])
    def test_equals_the_dataset(self, kind: str, table: datasets.Dataset, tmp_path: Path) -> None:
        path = tmp_path / f"in.{'jsonl' if kind == 'json' else kind}"
        values: dict[str, Any] = {"path": str(path)}
        expected = list(table)
        match kind:
            case "json":
                table.to_json(str(path))
            case "parquet":
                table.to_parquet(str(path))
            case "csv":
                table.remove_columns("ids").to_csv(str(path))
                expected = list(table.remove_columns("ids"))
            case "arrow":
                table.save_to_disk(str(tmp_path / "saved"))
                values["path"] = str(tmp_path / "saved" / "data-*.arrow")
            case "saved":
                table.save_to_disk(str(path))
                values = {"name": str(path)}
            case "splits":
                datasets.DatasetDict({"first": table, "second": table.select([3, 4])}).save_to_disk(str(path))
                values = {"name": str(path), "split": "first", "eval_split": "second"}
        source = opened(tmp_path, source="hf", eval_fraction=0.1, **values)
        assert isinstance(source, RecordSource)
        records = all_of(source.train) + (all_of(source.evaluation) if kind != "splits" else [])
        for record, row in zip(records, expected, strict=True):
            assert {name: np.asarray(value).tolist() for name, value in record.items()} == row
        if kind == "splits":
            assert texts(source.evaluation) == ["t3", "t4"]
        random = np.random.default_rng(1).integers(0, 30, 10).tolist()
        assert [record["n"] for record in source.train.read(random)] == random  # type: ignore[index]

    def test_parts_of_files_are_trained_on_and_held_out(self, table: datasets.Dataset, tmp_path: Path) -> None:
        path = str(tmp_path / "in.jsonl")
        table.to_json(path)
        source = opened(tmp_path, source="hf", path=path, split="train[:90%]", eval_split="train[90%:]")
        assert texts(source.train) == table["text"][:36] and texts(source.evaluation) == table["text"][36:]
        source = opened(tmp_path, source="hf", path=path, split="train[:90%]", eval_path=path)
        assert texts(source.train) == table["text"][:36] and texts(source.evaluation) == table["text"][:]
        table.save_to_disk(str(tmp_path / "saved"))
        for values in ({"path": path}, {"name": str(tmp_path / "saved")}):
            with pytest.raises(ConfigError, match="validation"):
                opened(tmp_path, source="hf", eval_split="validation", **values)

    def stream(self, folder: Path, files: int = 3) -> HfStream:
        for part in range(files):
            write_lines(folder / f"{part}.jsonl", [f"{part}-{i}" for i in range(10 + part)])
        source = opened(folder, source="hf", path=f"{folder}/*.jsonl", streaming=True)
        assert isinstance(source, StreamSource) and isinstance(source.train, HfStream)
        return source.train

    @pytest.mark.parametrize("shares", [1, 2, 3, 4])
    def test_a_stream_is_read_by_one_share_each(self, shares: int, tmp_path: Path) -> None:
        stream = self.stream(tmp_path)
        # In threads, as the pipeline reads: a dataset is not thread-safe.
        with ThreadPoolExecutor(shares) as pool:
            parts = [
                pool.submit(lambda share: list(stream.iter_from(None, share=share, shares=shares)), i)
                for i in range(shares)
            ]
            seen = [part.result() for part in parts]
        everything = [record["text"] for share in seen for record, _ in share]  # type: ignore[index]
        assert sorted(everything) == sorted(f"{part}-{i}" for part in range(3) for i in range(10 + part))
        for share in seen:
            assert [cursor["number"] for _, cursor in share] == list(range(1, len(share) + 1))

    @pytest.mark.parametrize("shares", [1, 2, 3])
    def test_a_stream_resumes_from_any_cursor(self, shares: int, tmp_path: Path) -> None:
        stream = self.stream(tmp_path)
        followed = [iter(stream.iter_from(None, share=share, shares=shares)) for share in range(shares)]
        seen: list[list[tuple[Any, Cursor]]] = [[] for _ in followed]
        # Shares in turn, as a process with several of them reads.
        for _ in range(40):
            for share, records in enumerate(followed):
                seen[share] += [item for item in [next(records, None)] if item is not None]
        for share, read in enumerate(seen):
            for at, (_, cursor) in enumerate(read):
                # Twice: a cursor of a resumed stream is as good.
                again = stream.iter_from(json.loads(json.dumps(cursor)), share=share, shares=shares)
                behind = [cursor, *(later for _, later in islice(again, 3))][-1]
                rest = stream.iter_from(json.loads(json.dumps(behind)), share=share, shares=shares)
                expected = [(record, later["number"]) for record, later in read[at + 4 :]]
                assert [(record, later["number"]) for record, later in rest] == expected

    def test_a_stream_has_no_held_out_records(self, tmp_path: Path) -> None:
        self.stream(tmp_path)
        data = Data(source="hf", path=f"{tmp_path}/*.jsonl", streaming=True, cache=str(tmp_path / "cache"))
        with pytest.raises(ConfigError, match=r"data\.eval_split=null: must be set to evaluate"):
            next(Pipeline(data, SPEC).held_out()).take()
        data = Data(source="hf", path=f"{tmp_path}/*.jsonl", streaming=True, eval_path=f"{tmp_path}/0.jsonl")
        assert next(Pipeline(data, SPEC).held_out()).take()["tokens"][1] == ord("0")

    def test_one_message_for_data_that_cannot_be_loaded(
        self, table: datasets.Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
        datasets.DatasetDict({"first": table}).save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{bad\n')
        write_lines(tmp_path / "a.jsonl", ["a"])
        (tmp_path / "a.csv").write_text("text\na\n")
        for values, message in {
            ("name", "no-one/has-this"): r"data\.name=no-one/has-this: cannot be loaded: .*no-one/has-this",
            ("name", f"{tmp_path}/saved"): r"data\.split=train: is not a split of the saved dataset\n.*accepted: first",
            ("path", f"{tmp_path}/bad.jsonl"): r"data\.path=.*bad\.jsonl: cannot be loaded: JSON parse error",
            ("path", f"{tmp_path}/a.*"): r"has files of several kinds: csv, json",
            ("path", f"{tmp_path}/none.jsonl"): "no such file",
        }.items():
            with pytest.raises(ConfigError, match=message) as error:
                opened(tmp_path, source="hf", **dict([values]))
            assert len(str(error.value).splitlines()) <= 3


@pytest.fixture(scope="module")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tfds")
    build_letters(folder, 60)
    return folder


class TestTfds:
    @pytest.mark.parametrize("split", ["train", "train[10:25]", "train[50%:]", "validation"])
    def test_equals_tfds(self, split: str, builds: Path, tmp_path: Path) -> None:
        source = opened(tmp_path, source="tfds", name="letters", data_dir=str(builds), split=split, eval_split="train")
        assert isinstance(source, RecordSource)
        expected = list(tfds.data_source("letters", data_dir=builds, split=split))
        records = all_of(source.train)
        assert [record["text"] for record in records] == [record["text"] for record in expected]
        for record, other in zip(records, expected, strict=True):
            assert record["ids"].tolist() == other["ids"]
        assert len(source.evaluation) == 60

    def test_features_that_need_decoding(self, builds: Path, tmp_path: Path) -> None:
        values = {"source": "tfds", "name": "letters:1.0.0", "data_dir": str(builds), "record_type": "chat"}
        source = opened(tmp_path, **values, eval_fraction=0.1)
        assert isinstance(source, RecordSource)
        expected = list(tfds.data_source("letters", data_dir=builds, split="train"))[: len(source.train)]
        assert [str(record) for record in all_of(source.train)] == [str(record) for record in expected]

    def test_missing_builds_and_splits(self, builds: Path, tmp_path: Path) -> None:
        values = {"source": "tfds", "data_dir": str(builds)}
        with pytest.raises(ConfigError, match=r"data\.name=no_such: cannot be opened(?s:.)*contains.* letters"):
            opened(tmp_path, **values, name="no_such")
        with pytest.raises(ConfigError, match=r"data\.split=nope(?s:.)*accepted: train, validation"):
            opened(tmp_path, **values, name="letters", split="nope")


class TestC4:
    SEQUENCES = ([5, 6, 1, 7, 8, 9, 0, 0], [9, 8, 7, 6, 5, 4, 3, 2])

    def test_as_mlperf(self, tmp_path: Path) -> None:
        text = [{"text": f"document {i} of several"} for i in range(30)]
        build_c4(tmp_path, "3.0.4", "train2", text, {"text": tfds.features.Text()})
        ids = [{"ids": np.array(sequence)} for sequence in self.SEQUENCES]
        sequence = tfds.features.Sequence(np.int64)
        build_c4(tmp_path, "3.0.5", "validation_tokenized_5662seqs", ids, {"ids": sequence})
        overrides = ["data=c4_mlperf", f"data.data_dir={tmp_path}", f"data.cache={tmp_path}/cache"]
        data = compose([*overrides, "data.shuffle=false"], None).config.data
        source = open_source(data, data, SPEC)
        assert isinstance(source, RecordSource)
        assert texts(source.train) == [record["text"].encode() for record in text]

        stream = Pipeline(data, SPEC).stream(share=0, num_shares=1)
        rows = [stream.take() for _ in range(20)]
        assert all(row["weights"].all() for row in rows), "documents continue in the next row, so there is no padding"

        mesh = build_mesh(Mesh(data=1), jax.devices()[:1])
        sharding = Sharder(mesh, RULES).sharding(("act_batch", "act_length"))
        [batch] = eval_batches(data, BatchSpec(rows=SPEC, batch=2, sharding=sharding))
        assert np.asarray(batch["tokens"])[:, :7].tolist() == [[5, 6, 1, 7, 8, 0, 0], [9, 8, 7, 6, 5, 4, 3]]
        assert np.asarray(batch["targets"])[:, :7].tolist() == [[6, 1, 7, 8, 9, 0, 0], [8, 7, 6, 5, 4, 3, 2]]
        assert np.asarray(batch["weights"]).sum(1).tolist() == [5, 7]
        assert source.evaluation_record_type is not None
        [example] = source.evaluation_record_type.encode([{"ids": np.array([5, 257, 6])}])
        assert source.evaluation_record_type.row(example, 4)["weights"].tolist() == [0, 1, 0, 0], "257 ends a document"


def naive_repeats(tokens: list[int]) -> bool:
    """The definition, taken literally."""
    return any(
        tokens[at : at + period] * 32 == tokens[at : at + 32 * period]
        for period in range(1, 14)
        for at in range(len(tokens) - 32 * period + 1)
    )


class TestOlmo:
    def test_rows_are_windows_of_the_files(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        shards = {
            name: random.integers(0, 90_000, size, np.uint32) for name, size in (("a", 100), ("b", 15), ("c", 48))
        }
        path = build_olmo(tmp_path, 16, **shards)
        remap = {"remap_from": "gs://bucket/", "remap_to": f"{tmp_path}/"}
        source = opened(tmp_path, source="olmo", path=path, eval_fraction=0.2, **remap)
        assert isinstance(source, RowSource)
        windows = [window for tokens in shards.values() for window in tokens[: len(tokens) // 16 * 16].reshape(-1, 16)]
        rows = [part[i] for part in (source.train, source.evaluation) for i in range(len(part))]
        assert (len(source.train), len(source.evaluation)) == (7, 2)
        for row, window in zip(rows, windows, strict=True):
            assert row["tokens"][:15].tolist() == window[:15].tolist()
            assert row["targets"][:15].tolist() == window[1:].tolist()
            assert row["weights"].tolist() == [1] * 15 + [0]

    def test_a_header_is_read_too_and_relative_paths(self, tmp_path: Path) -> None:
        np.save(tmp_path / "a.npy", np.arange(64, dtype=np.uint16))
        entry = {"path": "a.npy", "label": "", "n_tokens": 64}
        index = {"format_version": "1", "sequence_length": 16, "dtype": "uint32", "files": [entry]}
        (tmp_path / "index.json").write_text(json.dumps(index))
        source = opened(tmp_path, source="olmo", path=f"{tmp_path}/index.json")
        assert isinstance(source, RowSource) and source.train[2]["tokens"][:3].tolist() == [32, 33, 34]

    def test_repetitive_rows_have_no_loss(self, tmp_path: Path) -> None:
        random = np.random.default_rng(0)
        tokens = random.integers(0, 5, (6, 512), np.uint32)
        tokens[1, 40 : 40 + 13 * 32] = np.tile(random.integers(0, 90, 13), 32)
        tokens[3, 100:131] = 7
        tokens[5, 480:512] = 7
        path = build_olmo(tmp_path, 512, a=tokens.ravel())
        remap = {"remap_from": "gs://bucket/", "remap_to": f"{tmp_path}/"}
        spec = RowSpec(seq_len=512, vocab_size=90, seed=0)
        for filtered, expected in ((True, [1, 0, 1, 1, 1, 0]), (False, [1] * 6)):
            values = {**remap, "repetition_filter": filtered, "eval_path": path}
            source = opened(tmp_path, spec, source="olmo", path=path, **values)
            assert isinstance(source, RowSource)
            assert [int(source.train[i]["weights"].any()) for i in range(6)] == expected

    @pytest.mark.slow
    def test_repetition_by_its_definition(self) -> None:
        random = np.random.default_rng(1)
        results = []
        for _ in range(300):
            period, times = int(random.integers(1, 15)), int(random.integers(31, 36))
            core = np.tile(random.integers(0, 3, period), times)[
                : int(random.integers(period * 31, period * times + 1))
            ]
            tokens = np.concatenate([random.integers(0, 3, 20), core, random.integers(0, 3, 20)])
            assert is_repetitive(tokens) == naive_repeats(tokens.tolist())
            results.append(is_repetitive(tokens))
        assert 20 < sum(results) < 280

    def test_mismatched_files_and_settings(self, tmp_path: Path) -> None:
        path = build_olmo(tmp_path, 16, a=np.arange(64, dtype=np.uint32))
        remap = {"remap_from": "gs://bucket/", "remap_to": f"{tmp_path}/"}
        for spec, values, message in (
            (RowSpec(32, 100, 0), remap, r"train\.seq_len=32: is not the sequence length(?s:.)*accepted: 16"),
            (SPEC, {}, r"gs://bucket/a\.npy, which is not a local file"),
            (SPEC, {"remap_from": "gs://bucket/", "remap_to": "/none/"}, r"/none/a\.npy: a file of the index cannot"),
        ):
            with pytest.raises(ConfigError, match=message):
                opened(tmp_path, spec, source="olmo", path=path, **values)
        source = opened(tmp_path, RowSpec(16, 40, 0), source="olmo", path=path, eval_path=path, **remap)
        with pytest.raises(ConfigError, match=r"model\.vocab_size=40: is too small: .*a\.npy has token id 47"):
            assert isinstance(source, RowSource) and source.train[2]
        (tmp_path / "a.npy").write_bytes(bytes(100))
        with pytest.raises(ConfigError, match="has 25 tokens, but the index says 64"):
            opened(tmp_path, source="olmo", path=path, **remap)
        (tmp_path / "index.json").write_text('{"format_version": "1"}')
        with pytest.raises(ConfigError, match="is not an index of token shards: KeyError 'sequence_length'"):
            opened(tmp_path, source="olmo", path=path, **remap)


class TestOptions:
    @pytest.mark.parametrize("option", ["grain", "hf", "tfds", "olmo", "mixture", "text"])
    def test_required_fields(self, option: str) -> None:
        with pytest.raises(ConfigError, match=f"needed by source={option}"):
            compose([f"data={option}"], None)

    @pytest.mark.parametrize(
        ("source", "fields"),
        [
            ("demo", ["path", "eval_path", "name", "eval_split"]),
            ("arithmetic", ["eval_path"]),
            ("tfds", ["path", "eval_path"]),
            ("reasoning_gym", ["eval_split"]),
        ],
    )
    def test_fields_that_a_source_does_not_use_are_rejected(self, source: str, fields: list[str]) -> None:
        """`data.eval_path=mine.txt` without data=text would evaluate on held-out Shakespeare."""
        name = {"name": "x"} if source in NAMED else {}
        problems = list(Data(source=source, **{**name, **dict.fromkeys(fields, "x")}).check())
        assert [problem.path for problem in problems] == fields
        assert {problem.reason for problem in problems} == {f"is not used by source={source}"}

    def test_weights_that_name_no_source(self) -> None:
        sources = ["+data.sources={web: {source: synthetic}, books: {source: demo}}"]
        with pytest.raises(
            ConfigError, match=r"data\.weights\.bookz=0\.5: is not a source of data\.sources(?s:.)*did you mean 'books'"
        ):
            compose(["data=mixture", *sources, "+data.weights={web: 0.5, bookz: 0.5}"], None)
        with pytest.raises(ConfigError, match="has no weight for books"):
            compose(["data=mixture", *sources, "+data.weights={web: 0.5}"], None)
