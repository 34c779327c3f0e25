"""task=tokenize against the texts themselves; killed and resumed; rejected settings."""

import json
import os
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordReader

from maxhydra import runtime
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Corpus, Data, OnError
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.data import BatchSpec, RowSpec, train_loader
from maxhydra.data.formats.payload import decode_arrays
from maxhydra.data.records import Record
from maxhydra.data.shards import Shards, open_index
from maxhydra.data.sources.grain import open_records
from maxhydra.record import RunDirectory
from maxhydra.tasks import Job, tokenize
from tests.support.cli import ROOT, run_ok, start_silent
from tests.support.skips import import_optional

datasets = import_optional("datasets", extra="data")

TEXTS = [f"{index} " + "word " * (index % 23) + "é" * (index % 3) for index in range(600)]


def gated(record: Record) -> Record:
    """A formatting function that blocks the later records until a file exists."""
    while int(record["text"].split()[0]) >= 320 and not Path(os.environ["GATE"]).exists():
        time.sleep(0.02)
    return record


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return path


def data_of(path: Path, **values: object) -> Data:
    fields = {"source": "grain", "path": str(path), "cache": str(path.parent / "cache"), **values}
    return Data(**fields)  # type: ignore[arg-type]


def arguments(path: Path, output: Path, *more: str) -> list[str]:
    source = ["task=tokenize", "data.source=grain", f"data.path={path}", f"data.cache={path.parent / 'cache'}"]
    return [*source, f"task.output={output}", "task.shards=4", *more]


def tokens_in(folder: Path) -> list[list[int]]:
    """Tokens of every record of every shard, in order."""
    tokens = []
    for path in sorted(folder.glob("*.array_record")):
        reader = ArrayRecordReader(str(path))
        tokens += [decode_arrays(record)["tokens"].tolist() for record in reader.read_all()]
    return tokens


def expected(texts: list[str] = TEXTS) -> list[list[int]]:
    return [[256, *text.encode(), 257] for text in texts]


@pytest.mark.slow
def test_shards_hold_every_record_once_in_order_and_give_the_same_batches(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    done = run_ok(*arguments(texts, output, "task.workers=2"), cwd=tmp_path)
    assert tokens_in(output) == expected()
    index = json.loads((output / "index.json").read_text())
    assert index["complete"] and index["records"] == 600 and len(index["shards"]) == 4
    assert index["tokens"] == sum(map(len, expected())) and index["vocabulary"]["dtype"] == "uint16"
    assert "600 records" in done.stdout and not (tmp_path / "outputs").exists()

    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    spec = BatchSpec(rows=RowSpec(seq_len=64, vocab_size=259, seed=3), batch=4, sharding=sharding)
    loaders = train_loader(data_of(texts), spec), train_loader(data_of(output, record_type="tokens"), spec)
    for _ in range(40):
        from_texts, from_shards = (next(loader) for loader in loaders)
        for name in from_texts:
            np.testing.assert_array_equal(from_texts[name], from_shards[name])
    for loader in loaders:
        loader.close()


@pytest.mark.exhaustive
def test_a_killed_run_is_resumed(texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of four shards are finished when everything is killed; they are not written again."""
    output, gate = tmp_path / "out", tmp_path / "gate"
    overrides = arguments(texts, output, "task.workers=1", "data.formatting=tests.tasks.test_tokenize:gated")
    process = start_silent(*overrides, cwd=tmp_path, GATE=str(gate))
    index = output / "index.json"
    deadline = time.monotonic() + 240
    while not (index.exists() and len(json.loads(index.read_text())["shards"]) == 2):
        assert process.is_running() and time.monotonic() < deadline
        time.sleep(0.05)
    while not list(output.glob(".*.partial")):
        time.sleep(0.05)
    assert "is being written by another process" in rejection(texts, output)
    process.kill()
    process.wait()
    assert not json.loads(index.read_text())["complete"] and len(tokens_in(output)) == 300
    with pytest.raises(ConfigError, match=r"has written only 2 of 4 shards"):
        open_records(str(output), Corpus(source="grain", path=str(output), record_type="tokens"), Data())
    written = {path.name: path.stat().st_mtime_ns for path in output.glob("tokens-*")}
    gate.touch()
    monkeypatch.setenv("GATE", str(gate))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    config = compose(overrides, None).config
    tokenize.run(Job(config, {}, runtime.start(config.hardware), RunDirectory(tmp_path / "none", writes=False)))
    assert tokens_in(output) == expected() and json.loads(index.read_text())["complete"]
    assert {name: (output / name).stat().st_mtime_ns for name in written} == written
    assert not list(output.glob(".*.partial"))


def rejection(texts: Path, output: Path, count: int = 4, **values: object) -> str:
    data = data_of(texts, **values)
    with pytest.raises(ConfigError) as caught, open_index(output, data, Shards(data, output, count), count):
        pass
    return str(caught.value)


def write_first_shard(texts: Path, output: Path, **values: object) -> None:
    data = data_of(texts, **values)
    shards = Shards(data, output, 4)
    with open_index(output, data, shards, 4) as index:
        index.add(shards.name(0), shards.write(0, [0] * 8))


def test_other_settings_are_rejected(texts: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    write_first_shard(texts, output)
    assert "data.max_characters was 5000000 and is now 10" in rejection(texts, output, max_characters=10)
    data = data_of(texts)
    assert "task.shards was 4 and is now 3" in rejection(texts, output, count=3)
    with open_index(output, data, Shards(data, output, 4), 4) as index:
        assert list(index.done) == ["tokens-00000-of-00004.array_record"]
    texts.write_text(texts.read_text() + '{"text": "one more"}\n')
    assert "the source's records have changed" in rejection(texts, output)


def test_a_changed_tokenizer_is_rejected(texts: Path, tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    path, output = tmp_path / "tokenizer.json", tmp_path / "out"
    config = Config(kind="hf", path=str(path))
    vocabulary = {letter: number for number, letter in enumerate("wordé 0123456789")}
    Tokenizer(models.WordLevel(vocabulary, unk_token="w")).save(str(path))
    write_first_shard(texts, output, tokenizer=config)
    Tokenizer(models.WordLevel(vocabulary, unk_token="o")).save(str(path))
    assert "the tokenizer's files have changed" in rejection(texts, output, tokenizer=config)


def test_a_damaged_or_missing_shard_is_written_again(texts: Path, tmp_path: Path) -> None:
    output, data = tmp_path / "out", data_of(texts)
    write_first_shard(texts, output)
    (shard,) = output.glob("*.array_record")
    shard.write_bytes(shard.read_bytes()[:100])
    with open_index(output, data, Shards(data, output, 4), 4) as index:
        assert not index.done


@pytest.mark.parametrize("text", ["{cut", "[1, 2]", '{"complete": false}'])
def test_a_foreign_index(text: str, texts: Path, tmp_path: Path) -> None:
    """Many programs write an index.json: next to training files it is ignored, unless it may be from task=tokenize."""
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "index.json").write_text(text)
    shards = Shards(data_of(texts), folder, 2)
    with (
        pytest.raises(ConfigError, match=r"task\.output=.*its index\.json (was not written by|cannot be read)"),
        open_index(folder, data_of(texts), shards, 2),
    ):
        pass
    texts = texts.rename(folder / texts.name)
    if text == "{cut":
        with pytest.raises(ConfigError, match=r"data\.path=.*/index\.json: cannot be read"):
            open_records(str(texts), Corpus(), data_of(texts))
    else:
        assert len(open_records(str(texts), Corpus(), data_of(texts))) == 600


def test_foreign_files_are_not_overwritten(texts: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine.array_record").touch()
    assert "already holds mine.array_record" in rejection(texts, tmp_path / "out")


def test_bad_records_raise_or_are_counted(texts: Path, tmp_path: Path) -> None:
    lines = texts.read_text().splitlines()
    lines[7] = "{"
    texts.write_text("\n".join(lines))
    output = tmp_path / "out"
    output.mkdir()
    with pytest.raises(ConfigError, match=r"texts.jsonl, line 8: .*is not valid JSON"):
        Shards(data_of(texts), output, 2).write(0, [0] * 4)
    counters = [0] * 4
    shards = Shards(data_of(texts, on_error=OnError.skip), output, 2)
    results = [shards.write(shard, counters) for shard in range(2)]
    assert [len(shard.bad_records) for shard in results] == [1, 0] and counters[0::2] == [300, 300]
    assert tokens_in(output) == expected(TEXTS[:7] + TEXTS[8:])


def test_shards_include_held_out_records_but_no_separate_evaluation_data(tmp_path: Path) -> None:
    for name, few in {"train": TEXTS[:20], "test": TEXTS[20:24]}.items():
        datasets.Dataset.from_dict({"text": few}).save_to_disk(str(tmp_path / name))
    for more in ({}, {"eval_name": str(tmp_path / "test")}, {"eval_split": "train"}):
        shards = Shards(data_of(tmp_path / "train", source="hf", **more), tmp_path, 1)
        assert [record["text"] for record in shards.sample(20)] == TEXTS[:20]  # type: ignore[index]
        assert shards.records == 20


def test_loss_weights_round_trip(tmp_path: Path) -> None:
    from maxhydra.data.record_types import build_record_type
    from maxhydra.data.rows import Document

    texts = tmp_path / "texts.jsonl"
    texts.write_text('{"text": "ab"}\n' * 8)
    data = data_of(texts, record_type="tokens")
    mask = np.array([0, 1, 1, 0], np.float32)
    for weights in (None, mask, mask / 2):
        arrays = Shards(data_of(texts), tmp_path, 1)._arrays(Document(np.arange(4), weights))
        (back,) = build_record_type(data, data, RowSpec(seq_len=8, vocab_size=320, seed=0)).encode([arrays])
        assert back.tokens.tolist() == [0, 1, 2, 3]
        assert back.weights is None if weights is None else (back.weights == weights).all()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"source": "demo"}, "data.source=demo: has no records to tokenize"),
        ({"record_type": "prompts"}, "data.record_type=prompts: cannot be tokenized into shards"),
    ],
)
def test_sources_that_cannot_be_tokenized_are_rejected(texts: Path, values: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Shards(data_of(texts, **values), texts.parent, 2)


def test_more_shards_than_records_are_rejected(texts: Path) -> None:
    with pytest.raises(ConfigError, match=r"task.shards=601: is more than the 600 records"):
        Shards(data_of(texts), texts.parent, 601)


def test_a_folder_that_a_kill_left_without_an_index_is_completed(texts: Path, tmp_path: Path) -> None:
    """As after a kill between the rename of the first shard and the first index of an older version."""
    data, folder = data_of(texts), tmp_path / "out"
    folder.mkdir()
    shards = Shards(data, folder, 4)
    shards.write(1, [0] * 8)
    with open_index(folder, data, shards, 4) as index:
        written = json.loads((folder / "index.json").read_text())
        assert written["shards"] == index.done == {} and not written["complete"]
    with open_index(folder, data, shards, 4) as index:
        for shard in range(4):
            index.add(shards.name(shard), shards.write(shard, [0] * 8))
    assert tokens_in(folder) == expected() and json.loads((folder / "index.json").read_text())["complete"]


@pytest.mark.parametrize("name", ["tokens-00001-of-00004.array_record", "tokens-00001-of-00008.array_record"])
def test_shards_of_another_source_without_an_index_are_rejected(texts: Path, tmp_path: Path, name: str) -> None:
    other, folder = tmp_path / "other.jsonl", tmp_path / "out"
    other.write_text("".join(json.dumps({"text": text[::-1]}) + "\n" for text in TEXTS))
    folder.mkdir()
    Shards(data_of(other), folder, 4).write(1, [0] * 8)
    (folder / "tokens-00001-of-00004.array_record").rename(folder / name)
    data = data_of(texts)
    with (
        pytest.raises(ConfigError, match=f"already holds {name}, which this command did not write"),
        open_index(folder, data, Shards(data, folder, 4), 4),
    ):
        pass
    assert [path.name for path in folder.glob("*.array_record")] == [name] and not (folder / "index.json").exists()
