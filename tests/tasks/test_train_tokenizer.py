"""task=train_tokenizer: its output loads alike here and in transformers, and appears atomically."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from maxhydra import runtime
from maxhydra.config import ConfigError
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.data import Corpus, Data, OnError
from maxhydra.config.schema.data import Tokenizer as Config
from maxhydra.config.schema.tasks.preparation import TrainTokenizerTask
from maxhydra.data import RowSpec, load_tokenizer
from maxhydra.data.raw_texts import texts
from maxhydra.data.sources import RowSource, open_source
from maxhydra.data.sources.demo import TEXT
from maxhydra.record import RunDirectory
from maxhydra.tasks import Job
from maxhydra.tasks import train_tokenizer as task
from tests.support.cli import facts, run_ok
from tests.support.skips import import_optional

SAMPLES = ["Friends, Romans, countrymen,\n lend me  your ears; 1234", "naïve 日本語 🎭", "<|eos|><|im_end|>", ""]


def records(folder: Path, rows: list[dict[str, Any]], name: str = "r.jsonl") -> str:
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def train(folder: Path, *overrides: str) -> dict[str, float]:
    """Run the task in this process, and return its metrics."""
    config = compose(["task=train_tokenizer", "hardware=cpu", *overrides], None).config
    job = Job(config, {}, runtime.start(config.hardware), RunDirectory(folder / "run", writes=False))
    return task.run(job).metrics


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> str:
    rows = [{"body": line} for line in TEXT.read_text().splitlines()[:1500]]
    return f"data.path={records(tmp_path_factory.mktemp('lines'), rows)}"


@pytest.mark.slow
@pytest.mark.parametrize("model", ["bpe", "unigram"])
def test_loads_alike_here_and_in_transformers(tmp_path: Path, lines: str, model: str) -> None:
    folder = tmp_path / "trained"
    special = "task.special=['<|im_start|>','<|im_end|>']"
    overrides = [special, f"task.output={folder}", "data=grain", lines, "+data.columns.text=body"]
    metrics = train(tmp_path, f"task.model={model}", "task.vocab_size=500", *overrides)
    tokenizer = load_tokenizer(Data(tokenizer=Config(kind="hf", path=str(folder))))
    transformers = import_optional("transformers", extra="parity")
    reference = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert tokenizer.vocab_size == len(reference) == metrics["vocab_size"] == 500
    special_tokens = ["<|bos|>", "<|eos|>", "<|pad|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.special_token_ids == {name: number for number, name in enumerate(special_tokens)}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (0, 1, 2)
    assert (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (0, 1, 2)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text, "any text round-trips"
        assert tokenizer.encode_with_special_tokens(text)[0].tolist() == reference.encode(
            text, add_special_tokens=False
        )
        assert reference.decode(reference.encode(text, add_special_tokens=False), skip_special_tokens=False) == text
    assert metrics["characters_per_token"] > 1.5
    assert len(tokenizer.encode("the king and the queen")) < 12, "it has learned words"


@pytest.mark.slow
def test_the_command_and_rows_made_with_it(tmp_path: Path) -> None:
    run_ok("task=train_tokenizer", "task.vocab_size=300", "task.max_characters=20000", "run.name=made", cwd=tmp_path)
    folder = tmp_path / "outputs" / "made" / "tokenizer"
    assert sorted(path.name for path in folder.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]
    assert facts(folder.parent)["metrics"]["characters"] == 20000
    text = TEXT.read_bytes()[:20_000].decode(errors="ignore")
    (tmp_path / "short.txt").write_text(text)
    tokenizer = Config(kind="hf", path=str(folder))
    data = Data(source="text", path=str(tmp_path / "short.txt"), tokenizer=tokenizer)
    source = open_source(data, data, RowSpec(seq_len=64, vocab_size=300, seed=0))
    assert isinstance(source, RowSource)
    read = np.concatenate([source.train[row]["tokens"] for row in range(len(source.train))])
    assert len(read) > 1000
    assert text.startswith(load_tokenizer(data).decode(read.tolist()))


def test_an_existing_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="already exists"):
        train(tmp_path, f"task.output={tmp_path}")


def test_sentencepiece(tmp_path: Path, lines: str) -> None:
    overrides = [
        "task.model=sentencepiece",
        "task.vocab_size=500",
        "task.special=['<|turn|>']",
        "+data.columns.text=body",
    ]
    train(tmp_path, *overrides, "data=grain", lines, f"task.output={tmp_path / 'trained'}")
    tokenizer = load_tokenizer(
        Data(tokenizer=Config(kind="sentencepiece", path=str(tmp_path / "trained" / "tokenizer.model")))
    )
    assert set(tokenizer.special_token_ids) == {"<|bos|>", "<|eos|>", "<|pad|>", "<|turn|>"}
    assert (tokenizer.bos, tokenizer.eos, tokenizer.pad) == (1, 2, 3)
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("model", ["sentencepiece", "bpe", "unigram"])
def test_a_bad_record_leaves_nothing_behind(tmp_path: Path, model: str) -> None:
    path = records(tmp_path, [{"text": "some text"}] * 200 + [{"no text": 1}] * 200)
    with pytest.raises(ConfigError, match="has no column 'text'"):
        train(tmp_path, f"task.model={model}", "data=grain", f"data.path={path}", f"task.output={tmp_path / 'other'}")
    assert [path.name for path in tmp_path.iterdir()] == ["r.jsonl"], "nothing half-written is left"


@pytest.mark.parametrize("model", ["sentencepiece", "bpe", "unigram"])
def test_no_text(tmp_path: Path, model: str) -> None:
    path = records(tmp_path, [{"text": ""}] * 50)
    with pytest.raises(ConfigError, match="has no text to train a tokenizer on"):
        train(tmp_path, f"task.model={model}", "data=grain", f"data.path={path}", f"task.output={tmp_path / 'other'}")


class TestTexts:
    def test_of_a_file_without_the_held_out_part(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("line é\n" * 10_000)
        (tmp_path / "b.txt").write_text("other\n" * 10_000)
        data = Data(source="text", path=str(tmp_path), eval_fraction=0.25)
        read = "".join(texts(data, seed=0))
        everything = "line é\n" * 10_000 + "other\n" * 10_000
        assert everything.startswith(read)
        assert len(read.encode()) == pytest.approx(0.75 * len(everything.encode()), abs=4)
        plays = "".join(texts(Data(), seed=0)).encode()
        assert TEXT.read_bytes().startswith(plays)
        assert len(plays) == pytest.approx(0.95 * TEXT.stat().st_size, abs=4)

    @pytest.mark.parametrize(
        ("record_type", "record", "expected"),
        [
            ("text", {"text": "a", "other": "b"}, "a"),
            ("chat", {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "a\nb"),
            ("preference", {"prompt": "p", "chosen": "c", "rejected": "r"}, "c\nr\np"),
            ("prompts", {"prompt": "p", "answer": 3}, "p"),
            ("prompts", {"prompt": [{"role": "user", "content": "p"}], "answer": "3"}, "p\n3"),
        ],
    )
    def test_of_records(self, tmp_path: Path, record_type: str, record: dict[str, Any], expected: str) -> None:
        path = records(tmp_path, [record] * 40)
        data = Data(source="grain", path=path, record_type=record_type, eval_fraction=0.25)
        assert list(texts(data, seed=0)) == [expected] * 30

    def test_once_each_in_an_order_of_the_seed(self, tmp_path: Path) -> None:
        path = records(tmp_path, [{"text": str(number)} for number in range(300)])
        data = Data(source="grain", path=path, eval_fraction=0.01)
        one, two = list(texts(data, seed=0)), list(texts(data, seed=1))
        assert sorted(map(int, one)) == list(range(297))
        assert one != two
        assert sorted(one) == sorted(two)

    def test_of_a_mixture_by_weight(self, tmp_path: Path) -> None:
        sources = {
            name: Corpus(source="grain", path=records(tmp_path, [{"text": name * 10}] * 400, f"{name}.jsonl"))
            for name in "ab"
        }
        data = Data(source="mixture", sources=sources, weights={"a": 3.0, "b": 1.0})
        read = list(texts(data, seed=0))
        assert Counter(text[0] for text in read[:100]) == {"a": 75, "b": 25}
        assert Counter(text[0] for text in read) == {"a": 380, "b": 380}

    def test_bad_records(self, tmp_path: Path) -> None:
        path = records(tmp_path, [{"text": "a"}, {"text": 3}, {"text": "b"}, {"text": "c"}])
        data = Data(source="grain", path=path, shuffle=False)
        with pytest.raises(ConfigError, match=r"expected text, found int"):
            list(texts(data, seed=0))
        skipping = Data(source="grain", path=path, shuffle=False, on_error=OnError["skip"])
        assert list(texts(skipping, seed=0)) == ["a", "b"]

    @pytest.mark.parametrize(
        "values", [{"source": "synthetic"}, {"source": "grain", "path": "x", "record_type": "tokens"}]
    )
    def test_tokens_are_not_texts(self, values: dict[str, Any]) -> None:
        with pytest.raises(ConfigError, match="has tokens, not text"):
            list(texts(Data(**values), seed=0))


def test_invalid_settings() -> None:
    def problems(**values: Any) -> list[str]:
        return [str(problem) for problem in TrainTokenizerTask(name="train_tokenizer", **values).check()]

    assert not problems(vocab_size=259)
    assert "259 or more" in problems(vocab_size=258)[0]
    assert "contains '<|eos|>' twice" in problems(special=["<|eos|>"])[0]
