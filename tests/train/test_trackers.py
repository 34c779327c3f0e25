"""Trackers write readable files, keep one identity over sessions, and never fail a run."""

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Run, TrackerMode
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record import RunDirectory, logging_to
from maxhydra.train.trackers import open_trackers

ROOT = Path(__file__).parents[2]
SIZES = ("num_layers", "emb_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_length")


def config():
    return Config(model=Model(**dict.fromkeys(SIZES, 4)), run=Run(tags=["a", "b"], notes="why"))


def session(path, backends, resumed_from=0):
    run = RunDirectory(path)
    run.start("", {})
    tracker = TrackerConfig(backends=backends, mode=TrackerMode.offline)
    return run, open_trackers(tracker, run=run, config=config(), resumed_from=resumed_from)


def test_no_backend_does_nothing(tmp_path):
    run, tracker = session(tmp_path / "a", [])
    before = sorted(run.path.iterdir())
    tracker.log(1, {"loss": 1.0})
    tracker.close()
    assert sorted(run.path.iterdir()) == before


def test_processes_that_do_not_write_open_nothing(tmp_path):
    run = RunDirectory(tmp_path / "a", writes=False)
    open_trackers(TrackerConfig(backends=["tensorboard"]), run=run, config=config(), resumed_from=0).log(1, {"loss": 1})
    assert not run.path.exists()


def events(folder):
    """Events of all files in order of their names: records of length, checksum, bytes, checksum."""
    from tensorboardX.proto.event_pb2 import Event

    for path in sorted(folder.iterdir()):
        content, at = path.read_bytes(), 0
        while at < len(content):
            (length,) = struct.unpack_from("<Q", content, at)
            yield Event.FromString(content[at + 12 : at + 12 + length])
            at += 16 + length


def test_tensorboard_reads_back_and_hides_repeated_steps(tmp_path):
    run, tracker = session(tmp_path / "a", ["tensorboard"])
    for step in (1, 2, 3):
        tracker.log(step, {"loss": step / 2})
    tracker.close()
    run.finish("preempted")
    first = list(events(run.path / "tensorboard"))
    scalars = [(e.step, v.tag, v.simple_value) for e in first for v in e.summary.value if v.HasField("simple_value")]
    assert scalars == [(1, "loss", 0.5), (2, "loss", 1.0), (3, "loss", 1.5)]
    texts = [v.tensor.string_val[0].decode() for e in first for v in e.summary.value if v.tensor.string_val]
    assert len(texts) == 1 and '"emb_dim": 4' in texts[0]

    run, tracker = session(tmp_path / "a", ["tensorboard"], resumed_from=2)
    tracker.log(3, {"loss": 9.0})
    tracker.close()
    later = list(events(run.path / "tensorboard"))[len(first) :]
    assert [e.step for e in later if e.session_log.status == 1] == [3]
    assert [v.simple_value for e in later for v in e.summary.value if v.tag == "loss"] == [9.0]


WANDB = """
import sys
sys.path.insert(0, "tests")
from tests.train.test_trackers import session
for step in (0, 1):
    run, tracker = session(sys.argv[1], ["wandb"], resumed_from=step)
    tracker.log(step + 1, {"loss": 1.5, "eval/loss": float("nan")})
    tracker.close()
    run.finish("preempted")
"""


@pytest.mark.slow
def test_wandb_offline_keeps_its_id_and_stores_no_secret(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "WANDB_API_KEY": "0123hunter" * 4}
    command = [sys.executable, "-c", WANDB, str(tmp_path), "--token=hunter2"]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=120)
    facts = json.loads((tmp_path / "run.json").read_text())
    identity = facts["trackers"]["wandb"]["id"]
    offline = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len(offline) == 2 and all(folder.name.endswith(identity) for folder in offline)
    for folder in offline:
        record = (folder / f"run-{identity}.wandb").read_bytes()
        assert b"emb_dim" in record and b"eval/loss" in record and b"why" in record
    for path in tmp_path.rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert b"hunter" not in path.read_bytes(), path


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra(tmp_path):
    """In a separate process, with a path that shadows the package."""
    (tmp_path / "tensorboardX").mkdir()
    (tmp_path / "tensorboardX" / "__init__.py").write_text("raise ImportError('not here')")
    (tmp_path / "wandb").mkdir()
    (tmp_path / "wandb" / "__init__.py").write_text("raise ImportError('not here')")
    code = """
import sys
sys.path.insert(1, "tests")
from tests.train.test_trackers import ConfigError, session
for backend in ("tensorboard", "wandb"):
    try:
        session(sys.argv[1] + "/" + backend, [backend])
    except ConfigError as error:
        print(error)
"""
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-c", code, str(tmp_path / "runs")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "pip install 'maxhydra[tensorboard]'" in done.stdout and "pip install 'maxhydra[wandb]'" in done.stdout
    assert "tracker.backends=" in done.stdout


def test_a_failing_tracker_is_logged_once_and_the_others_continue(tmp_path, capsys):
    run, tracker = session(tmp_path / "a", ["tensorboard"])
    (run.path / "tensorboard").rename(run.path / "gone")
    with logging_to(None, console=True):
        for step in range(3):
            tracker.log(step, {"loss": object()})
        tracker.close()
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tensorboard rejected metrics") and "metrics.jsonl has them all" in line


def test_an_unknown_backend_is_rejected_before_anything_opens(tmp_path):
    with pytest.raises((ConfigError, ModuleNotFoundError)):
        session(tmp_path / "a", ["tensorbord"])
