"""A damaged run.json or config.yaml: the run resumes, and the damaged file is kept."""

import errno
import json
import resource
import signal
from pathlib import Path

import pytest

from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
from maxhydra.record.facts import parse_facts
from tests.support.run_folders import write_run


@pytest.mark.parametrize("content", ["", "{}", '{"status": "finished", "sess', "[]", "null", "[" * 100_000])
def test_a_run_with_a_damaged_run_json_starts_again(content: str, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "run.json").write_text(content)
    facts = RunDirectory(folder, writes=False).read()
    assert facts["status"] == "lost" and "run.json" in facts["reason"] and facts["task"] == "pretrain"
    assert facts["sessions"][0]["end_step"] == 40
    run = RunDirectory(folder)
    run.start("x: 1\n", {"task": "pretrain"})
    run.finish("finished", "done")
    assert (folder / "run.json.damaged").read_text() == content
    assert [session["status"] for session in run.read()["sessions"]] == ["lost", "finished"]


def test_a_run_with_checkpoints_and_without_run_json_keeps_its_files(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    (folder / "run.json").unlink()
    (folder / "checkpoints" / "40").mkdir(parents=True)
    run = RunDirectory(folder)
    run.start("x: 1\n", {"task": "pretrain"})
    run.withdraw("a mistake")
    assert (folder / "metrics.jsonl").exists() and run.read()["status"] == "failed"


def test_a_config_that_is_not_utf8_is_kept(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a")
    content = (folder / "config.yaml").read_bytes() + b"\xff\xfe"
    (folder / "config.yaml").write_bytes(content)
    (folder / "config.1.yaml").write_text("of an earlier session")
    run = RunDirectory(folder)
    run.start("x: 1\n", {"task": "pretrain"})
    run.finish("finished", "done")
    assert (folder / "config.yaml").read_text() == "x: 1\n" and (folder / "config.2.yaml").read_bytes() == content
    assert (folder / "config.1.yaml").read_text() == "of an earlier session"


def test_facts_of_this_version_are_accepted(tmp_path: Path) -> None:
    content = (write_run(tmp_path / "a") / "run.json").read_bytes()
    assert parse_facts(content) == json.loads(content)


def test_a_disk_that_fills_within_a_line_is_an_error_of_the_file(tmp_path: Path) -> None:
    """A file size limit truncates a write as a full disk does."""
    writer = MetricsWriter(tmp_path / "metrics.jsonl")
    writer.write(1, {"loss": 1.0})
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 5, limits[1]))
        with pytest.raises(OSError, match="No space left") as caught:
            writer.write(2, {"loss": 1.0})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, before)
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(tmp_path / "metrics.jsonl")
    writer.write(2, {"loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path / "metrics.jsonl")] == [1, 2]
