"""task=inspect_data: prints the texts with their loss mask, and a summary of the rows."""

import json
from pathlib import Path

import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from maxhydra import runtime
from maxhydra.config.compose.composer import compose
from maxhydra.data.formats.payload import encode_arrays
from maxhydra.record import RunDirectory
from maxhydra.tasks import Job, inspect_data
from tests.support.cli import run_ok

SMALL = ["task=inspect_data", "train.seq_len=32", "train.per_device_batch_size=2", "task.batches=3"]


def inspect(*overrides: str, folder: Path) -> None:
    config = compose([*SMALL, *overrides], None).config
    inspect_data.run(Job(config, {}, runtime.start(config.hardware), RunDirectory(folder / "none", writes=False)))


@pytest.fixture
def conversations(tmp_path: Path) -> list[str]:
    """Ten records in which only the capital letters have loss."""
    path = tmp_path / "tokens.array_record"
    writer = ArrayRecordWriter(str(path), "group_size:1")
    for _ in range(10):
        text = b"ask ANSWER"
        weights = np.array([0, *(letter in b"ANSWER" for letter in text), 1], np.uint8)
        writer.write(encode_arrays({"tokens": np.array([256, *text, 257], np.uint16), "weights": weights}))
    writer.close()
    return ["data=grain", f"data.path={path}", "data.record_type=tokens", f"data.cache={tmp_path / 'cache'}"]


def test_brackets_without_colour(
    conversations: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    inspect(*conversations, "task.rows=1", folder=tmp_path)
    printed = capsys.readouterr().out
    assert "\x1b" not in printed
    # 11 tokens each: two of them in a row of 32, and 10 tokens of padding.
    assert printed.count("[<bos>ask ]ANSWER<eos>\n") == 2
    assert "sequence 0: 2 documents, 22 of 32 tokens (68.8%)" in printed
    assert "--- document 2: 11 tokens" in printed and "--- 10 tokens of padding" in printed
    assert "6 sequences" in printed and "median 11" in printed and "0 records skipped" in printed


def test_colours_of_a_terminal(
    conversations: list[str], tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    inspect(*conversations, "task.rows=1", folder=tmp_path)
    assert "\x1b[2m<bos>ask \x1b[0m\x1b[32mANSWER<eos>\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "1")
    inspect(*conversations, "task.rows=1", folder=tmp_path)
    assert "[<bos>ask ]ANSWER<eos>" in capsys.readouterr().out


@pytest.mark.slow
def test_json_holds_the_texts_and_the_numbers(tmp_path: Path) -> None:
    texts = [f"{index} " + "word " * (index % 7) for index in range(60)]
    path = tmp_path / "texts.jsonl"
    lines = [json.dumps({"text": text}) for text in texts]
    lines[30] = "{"
    path.write_text("\n".join(lines))
    overrides = [
        f"data.path={path}",
        f"data.cache={tmp_path / 'cache'}",
        "data.on_error=skip",
        "data.packing.overlong=drop",
    ]
    done = run_ok(*SMALL, "data=grain", *overrides, "task.format=json", "task.rows=6", cwd=tmp_path)
    shown = json.loads(done.stdout)
    pieces = [piece for (sequence,) in shown["sequences"] for piece in sequence["pieces"]]
    for piece in pieces:
        (start, first), *rest = piece["runs"]
        assert not start and first == "<bos>" and all(has_loss for has_loss, _ in rest)
        text = "".join(text for _, text in rest)
        assert text.removesuffix("<eos>") in texts
        assert piece["places"] == len(text.removesuffix("<eos>")) + 1
    summary = shown["summary"]
    assert summary["sequences"] == 6
    assert summary["fill"] == pytest.approx(sum(piece["places"] for piece in pieces) / (6 * 32))
    assert summary["documents_per_sequence"] == pytest.approx(len(pieces) / 6)
    assert summary["skipped_records"] == 1
    # Read ahead when the third batch was made: all 57 training records except the bad one.
    assert summary["cut_documents"] == sum(len(text) + 1 > 32 for text in texts[:30] + texts[31:57])
    assert "line 31" in done.stderr and not (tmp_path / "outputs").exists()


@pytest.mark.parametrize("source", ["demo", "synthetic"])
def test_row_sources(source: str, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    inspect(f"data={source}", "task.rows=2", folder=tmp_path)
    printed = capsys.readouterr().out
    assert printed.count("32 of 32 tokens (100.0%)") == 2 and "100.00% filled, 1.00 documents" in printed
