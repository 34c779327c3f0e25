"""The run folder: its contents, and that it can be read whatever happened to the process that wrote it."""

import json
import logging
import math
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import maxhydra
from maxhydra.record import (
    MetricsWriter,
    NullMetricsWriter,
    RunDirectory,
    RunInUseError,
    logging_to,
    read_metrics,
    scan_metrics,
    series,
)
from maxhydra.record.atomic_io import NewerFormatError
from maxhydra.record.run_dir import RUN_FORMAT

ROOT = Path(__file__).parents[2]


def parse_strict(text):
    """Parse strict JSON: Python's NaN and Infinity literals are rejected."""

    def reject(name):
        raise ValueError(name)

    return json.loads(text, parse_constant=reject)


def test_import_does_not_load_jax():
    code = "import maxhydra.record, sys; assert not {'jax', 'numpy', 'omegaconf'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_lifecycle_of_a_run(tmp_path):
    run = RunDirectory(tmp_path / "a")
    run.start("x: 1\n", {"task": "pretrain", "choices": {"model": "tiny"}, "devices": ["cpu"], "xla_flags": "--a"})
    facts = run.read()
    assert facts["status"] == "running" and facts["finished"] is None and facts["name"] == "a"
    assert facts["choices"] == {"model": "tiny"} and facts["sessions"][0]["devices"] == ["cpu"]
    assert facts["python"].startswith("3.") and facts["packages"]["numpy"] == np.__version__
    assert {"command", "host", "cpu_count", "git", "variables", "created", "updated"} <= set(facts)

    run.update(timings={"compile": np.float32(1.5)}, start_step=0)
    run.update(timings={"first_step": 2.0}, best={"step": 3, "value": float("nan")})
    run.finish("finished", "all steps done", end_step=10, objective={"name": "eval/loss", "value": 1.25})
    facts = parse_strict(run.facts_path.read_text())
    assert facts["status"] == "finished" and facts["reason"] == "all steps done" and facts["finished"]
    assert facts["timings"]["compile"] == 1.5 and facts["timings"]["first_step"] == 2 and facts["timings"]["total"] >= 0
    assert facts["best"] == {"step": 3, "value": "NaN"} and facts["objective"]["value"] == 1.25
    (session,) = facts["sessions"]
    assert (session["start_step"], session["end_step"], session["status"]) == (0, 10, "finished")
    assert run.config_path.read_text() == "x: 1\n"


@pytest.mark.slow
def test_second_session_keeps_the_first_and_its_config(tmp_path):
    for number, config in enumerate(["x: 1\n", "x: 1\n", "x: 2\n"]):
        run = RunDirectory(tmp_path / "a")
        run.start(config, {"task": "pretrain"})
        run.update(start_step=number)
        run.finish("preempted" if number < 2 else "finished", "because")
    facts = run.read()
    assert [s["start_step"] for s in facts["sessions"]] == [0, 1, 2]
    assert [s["status"] for s in facts["sessions"]] == ["preempted", "preempted", "finished"]
    assert run.config_path.read_text() == "x: 2\n"
    assert sorted(p.name for p in run.path.glob("config.*")) == ["config.2.yaml", "config.yaml"]


def test_an_exception_in_a_session_marks_the_run_as_failed(tmp_path):
    run = RunDirectory(tmp_path / "a")
    with pytest.raises(ValueError), run.session("", {}):
        raise ValueError("no such thing: password=hunter2")
    assert run.read()["status"] == "failed"
    assert run.read()["reason"] == "ValueError: no such thing: password=***"


@pytest.mark.slow
def test_withdraw_removes_a_new_run_and_fails_an_old_one(tmp_path):
    new = RunDirectory(tmp_path / "new")
    with pytest.raises(ValueError), new.session("x: 1", {}), logging_to(new.log_path, console=False) as log:
        log.info("begin")
        new.withdraw("a mistake")
        raise ValueError("a mistake")
    assert not new.path.exists()

    first = RunDirectory(tmp_path / "outputs" / "first")
    first.start("x: 1", {})
    first.withdraw("a mistake")
    assert not (tmp_path / "outputs").exists()

    old = RunDirectory(tmp_path / "old")
    old.start("x: 1", {})
    old.finish("preempted")
    with pytest.raises(ValueError), old.session("x: 1", {}):
        old.withdraw("a mistake")
        raise ValueError("something else")
    assert (old.read()["status"], old.read()["reason"]) == ("failed", "a mistake")

    shared = RunDirectory(tmp_path / "shared")
    shared.path.mkdir()
    (shared.path / "mine.txt").write_text("keep")
    shared.start("", {})
    shared.withdraw("a mistake")
    assert [path.name for path in shared.path.iterdir()] == ["mine.txt"]


@pytest.mark.slow
def test_only_one_process_writes_a_run(tmp_path):
    code = """
import sys, time
from maxhydra.record import RunDirectory
RunDirectory(sys.argv[1]).start("", {})
print("on", flush=True)
time.sleep(60)
"""
    holder = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE)
    try:
        assert holder.stdout.readline() == b"on\n"
        with pytest.raises(RunInUseError, match=f"process {holder.pid}"):
            RunDirectory(tmp_path).start("", {})
    finally:
        holder.kill()
        holder.wait()
    assert RunDirectory(tmp_path).read()["status"] == "lost"
    RunDirectory(tmp_path).start("", {})
    facts = RunDirectory(tmp_path).read()
    assert facts["status"] == "running" and facts["sessions"][0]["status"] == "lost"


def test_a_run_on_another_host_is_lost_after_a_missing_heartbeat(tmp_path):
    run = RunDirectory(tmp_path)
    run.start("", {})
    facts = json.loads(run.facts_path.read_text())
    facts["sessions"][0]["host"] = socket.gethostname() + "-other"
    run.facts_path.write_text(json.dumps(facts))
    assert run.read()["status"] == "running"
    run.facts_path.write_text(json.dumps({**facts, "updated": "2020-01-01T00:00:00Z"}))
    assert run.read()["status"] == "lost"


def test_a_new_process_with_the_same_pid_is_not_the_run(tmp_path):
    run = RunDirectory(tmp_path)
    run.start("", {})
    facts = json.loads(run.facts_path.read_text())
    facts["sessions"][0]["pid_started"] = "another boot/1"
    run.facts_path.write_text(json.dumps(facts))
    assert run.read()["status"] == "lost"


def test_other_processes_write_nothing(tmp_path):
    run = RunDirectory(tmp_path / "a", writes=False)
    with run.session("", {}):
        run.update(x=1)
        run.heartbeat(y=1)
        run.finish("finished")
    writer = NullMetricsWriter()
    writer.write(1, {"loss": 1.0})
    writer.truncate(0)
    writer.close()
    assert not (tmp_path / "a").exists()


def test_a_heartbeat_that_cannot_be_written_is_logged(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("maxhydra.record.run_dir.HEARTBEAT_SECONDS", 0)
    run = RunDirectory(tmp_path / "a")
    run.start("", {})
    run.path.rename(tmp_path / "gone")
    with logging_to(None, console=True):
        run.heartbeat(x=1)
    assert "run.json is out of date" in capsys.readouterr().err
    with pytest.raises(FileNotFoundError):
        run.update(x=1)


def test_heartbeats_are_rate_limited(tmp_path):
    run = RunDirectory(tmp_path)
    run.start("", {})
    before = run.facts_path.stat().st_ino
    for step in range(100):
        run.heartbeat(last={"loss": step})
    assert run.facts_path.stat().st_ino == before
    run.finish("finished")
    assert run.read()["last"] == {"loss": 99}


RECORDER = """
import json
from maxhydra.record import RunDirectory, environment
run = RunDirectory("outputs/a")
run.start("", {})
run.finish("finished")
print(json.dumps(environment()))
"""


def test_environment_contains_no_secret(tmp_path):
    """A separate checkout with uncommitted changes, a remote with a password, and secrets in several places."""

    def git(*arguments):
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], cwd=tmp_path, check=True)

    shutil.copytree(ROOT / "maxhydra" / "record", tmp_path / "maxhydra" / "record")
    shutil.copy(ROOT / "maxhydra" / "__init__.py", tmp_path / "maxhydra")
    (tmp_path / "settings.py").write_text("x = 1\n")
    (tmp_path / ".gitignore").write_text("outputs/\n__pycache__/\n")
    git("init", "-q", "-b", "work")
    git("add", ".")
    git("commit", "-qm", "one")
    git("remote", "add", "origin", "https://me:hunter2@example.com/x.git")
    (tmp_path / "settings.py").write_text('x = 2\nAPI_KEY = "hunter2"\n')
    (tmp_path / "new.py").write_text("")
    secrets = {"WANDB_API_KEY": "hunter2", "XLA_FLAGS": "--xla_x", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", RECORDER, "train.steps=1", "tracker.api_key=hunter2"],
        cwd=tmp_path,
        env={**os.environ, **secrets},
        capture_output=True,
        text=True,
        check=True,
    )
    facts = json.loads(done.stdout)
    assert "hunter2" not in done.stdout
    assert facts["command"][1:] == ["train.steps=1", "tracker.api_key=***"]
    assert facts["git"]["dirty"] and facts["git"]["untracked"] == ["new.py"] and len(facts["git"]["sha"]) == 40
    assert facts["git"]["branch"] == "work" and facts["git"]["remote"] == "https://***@example.com/x.git"
    assert "+x = 2" in facts["diff"] and '+API_KEY = "***"' in facts["diff"]
    assert facts["variables"]["XLA_FLAGS"] == "--xla_x"

    run = RunDirectory(tmp_path / "outputs" / "a")
    assert run.read()["git"]["diff"] == "diff.patch"
    assert "+x = 2" in (run.path / "diff.patch").read_text()
    assert not any("hunter2" in path.read_text() for path in run.path.iterdir())


def test_metrics_round_trip(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write(1, {"loss": np.float32(0.1), "b": 2, "a": 0.5})
    writer.write(1, {"eval/loss": float("nan"), "x": math.inf, "y": -math.inf})
    writer.close()
    lines = path.read_text().splitlines()
    assert list(parse_strict(lines[0])) == ["step", "loss", "b", "a"]
    assert parse_strict(lines[1]) == {"step": 1, "eval/loss": "NaN", "x": "Infinity", "y": "-Infinity"}
    first, second = read_metrics(path)
    assert np.float32(first["loss"]) == np.float32(0.1) and first["b"] == 2
    assert math.isnan(second["eval/loss"]) and (second["x"], second["y"]) == (math.inf, -math.inf)
    assert series(path, "a") == ([1], [0.5]) and series(read_metrics(path), "none") == ([], [])


def test_a_metric_cannot_be_named_step(tmp_path):
    with pytest.raises(ValueError):
        MetricsWriter(tmp_path / "m").write(1, {"step": 2})


@pytest.mark.parametrize("tail", [b"", b'{"step": 3, "lo', b'{"step": 3}'])
def test_an_incomplete_line_is_dropped(tmp_path, tail):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n' + tail)
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    writer = MetricsWriter(path)
    writer.write(3, {"loss": 1.0})
    writer.flush()
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]


def test_truncate_keeps_up_to_a_step_and_writing_continues(tmp_path):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    for step in (1, 2, 2, 3, 4):
        writer.write(step, {"loss": step})
    writer.truncate(after_step=2)
    writer.write(3, {"loss": 30})
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == [(1, 1), (2, 2), (2, 2), (3, 30)]
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


@pytest.mark.parametrize("damage", [b"\0\0\0", b'{"step": 2, "lo', b"\xff\xfe", b"[]", b"{}"])
def test_a_damaged_line_does_not_prevent_resuming(tmp_path, damage):
    """A power failure may leave arbitrary bytes in the middle of a file."""
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n{"step": 4}\n')
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4]
    writer = MetricsWriter(path)
    writer.truncate(after_step=3)
    writer.write(4, {"loss": float("nan")})
    assert [row["step"] for row in read_metrics(path)] == [1, 3, 4] and scan_metrics(path).bad_lines == [2]


def test_no_file_has_no_metrics(tmp_path):
    assert read_metrics(tmp_path / "none.jsonl") == []


WRITER = """
import sys
from maxhydra.record import MetricsWriter, RunDirectory, read_metrics
run = RunDirectory(sys.argv[1])
run.start("x: 1\\n" * 50, {"padding": "p" * 5000})
writer = MetricsWriter(run.metrics_path)
step = len(read_metrics(run.metrics_path))
writer.truncate(step)
print("on", flush=True)
while True:
    step += 1
    writer.write(step, {f"metric_{i}": step for i in range(40)})
    run.update(step=step, sample="s" * (step % 7000))
    if step % 50 == 0:
        writer.truncate(step - 3)
        step -= 3
"""


@pytest.mark.exhaustive
def test_a_kill_at_any_moment_leaves_all_files_readable(tmp_path):
    rng = random.Random(0)
    for session in range(1, 9):
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        assert writer.stdout.readline() == b"on\n", writer.stderr.read()
        time.sleep(rng.uniform(0, 0.15))
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        run = RunDirectory(tmp_path)
        facts = run.read()
        assert facts["status"] == "lost" and len(facts["sessions"]) == session
        assert run.config_path.read_text() == "x: 1\n" * 50
        rows = read_metrics(run.metrics_path)
        assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(len(row) == 41 for row in rows)


def test_a_full_disk_leaves_the_file_unchanged(tmp_path):
    """A file size limit simulates a full disk: the write comes up short."""
    code = """
import resource, signal, sys
from maxhydra.record import MetricsWriter, read_metrics
from maxhydra.record.atomic_io import replace_file
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
writer = MetricsWriter(sys.argv[1])
writer.write(1, {"loss": 1.0})
replace_file(sys.argv[2], "old")
resource.setrlimit(resource.RLIMIT_FSIZE, (40, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
for attempt in (lambda: writer.write(2, {"loss": 1.0, "padding": 2.0}), lambda: replace_file(sys.argv[2], "n" * 1000)):
    try:
        attempt()
    except OSError:
        print("failed")
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "m.jsonl"), str(tmp_path / "f")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == ["failed", "failed"], done.stderr
    assert (tmp_path / "m.jsonl").read_text() == '{"step": 1, "loss": 1.0}\n'
    assert (tmp_path / "f").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 2


def test_the_log_file_has_timestamps_and_stderr_has_not(tmp_path, capsys):
    for session in (1, 2):
        with logging_to(tmp_path / "log.txt", console=True) as log:
            log.info("session %d", session)
            log.info("hidden", extra={"file_only": True})
    with logging_to(None, console=False) as log:
        log.info("quiet")
        log.warning("loud")
    assert capsys.readouterr().err.splitlines() == ["session 1", "session 2", "loud"]
    lines = (tmp_path / "log.txt").read_text().splitlines()
    assert [line.split(" ", 3)[3] for line in lines] == ["session 1", "hidden", "session 2", "hidden"]
    assert all(line[:2] == "20" and " INFO " in line for line in lines)
    assert not logging.getLogger("maxhydra").handlers


@pytest.mark.slow
def test_run_json_carries_its_format(tmp_path):
    run = RunDirectory(tmp_path / "a")
    run.start("", {})
    run.finish("finished")
    facts = json.loads(run.facts_path.read_text())
    assert (facts["format"], facts["maxhydra"]) == (RUN_FORMAT, maxhydra.__version__)
    for earlier in ("format", "maxhydra"):
        del facts[earlier]
    run.facts_path.write_text(json.dumps(facts))
    assert RunDirectory(tmp_path / "a").read()["status"] == "finished"
    run.start("", {})
    run.finish("finished")
    assert json.loads(run.facts_path.read_text())["format"] == RUN_FORMAT
    run.facts_path.write_text(json.dumps({**facts, "format": 9, "maxhydra": "3.0.0"}))
    with pytest.raises(NewerFormatError, match=r"has format 9, written by maxhydra 3\.0\.0"):
        RunDirectory(tmp_path / "a").read()
