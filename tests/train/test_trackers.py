"""Trackers write readable files, keep one identity over sessions, and never fail a run."""

import dataclasses
import json
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from maxhydra.config import Config, ConfigError
from maxhydra.config.schema.model import Model
from maxhydra.config.schema.run import Run, TrackerMode
from maxhydra.config.schema.run import Tracker as TrackerConfig
from maxhydra.record import RunDirectory, logging_to
from maxhydra.record.rollout_store import RolloutWriter
from maxhydra.train import trackers
from maxhydra.train.trackers import open_trackers, track_outcome
from tests.support.polling import wait_for

ROOT = Path(__file__).parents[2]
SIZES = ("num_layers", "emb_dim", "mlp_dim", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "context_length")


def config(outputs="outputs"):
    return Config(model=Model(**dict.fromkeys(SIZES, 4)), run=Run(tags=["a", "b"], notes="why", outputs=outputs))


def session(path, backends, resumed_from=0, outputs="outputs", **options):
    run = RunDirectory(path)
    run.start("", {})
    tracker = TrackerConfig(backends=backends, mode=TrackerMode.offline, **options)
    tracked = dataclasses.replace(config(outputs), tracker=tracker)
    return run, open_trackers(tracker, run=run, config=tracked, resumed_from=resumed_from)


def end(run, backends, *, status, outputs):
    """End a session with a sample and a rollout, as a task does."""
    row = {"prompt_number": 0, "sample": 0, "reward": 1.0, "tokens": 2, "prompt": "1+1=", "completion": "2"}
    RolloutWriter(run.path / "rollouts", "train", keep=100).append(2, [row])
    tracked = dataclasses.replace(config(outputs), tracker=TrackerConfig(backends=backends))
    track_outcome(tracked, run, status=status, facts={"end_step": 3, "sample": "To be"})
    run.finish(status)


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_rollouts_are_sent_after_each_evaluation(tmp_path):
    run, tracker = session(tmp_path / "a", ["tensorboard"])
    writer = RolloutWriter(run.path / "rollouts", "eval", keep=100)
    for step in (1, 2, 3):
        row = {
            "prompt_number": 0,
            "sample": 0,
            "reward": 1.0,
            "tokens": 2,
            "prompt": "1+1=",
            "completion": f"at {step}",
        }
        writer.append(step, [row])
        tracker.log(step, {"loss": 0.5} if step == 2 else {"eval/error": 0.5})
        # The tracker's thread reads the file: wait for it before the next step.
        tracker.close()
        _, tracker = session(tmp_path / "a", ["tensorboard"], resumed_from=step)
    tracker.close()
    values = [(e.step, v) for e in events(run.path / "tensorboard") for v in e.summary.value]
    texts = [(step, v.tensor.string_val[0].decode()) for step, v in values if v.tag.startswith("rollouts/eval")]
    assert [step for step, _ in texts] == [1, 3]
    assert "at 1" in texts[0][1] and texts[1][1].index("at 1") < texts[1][1].index("at 2") < texts[1][1].index("at 3")


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
    subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=240)
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


MLFLOW = """
import sys
from tests.train.test_trackers import end, session
for step in (0, 1):
    run, tracker = session(sys.argv[1] + "/a", ["mlflow"], resumed_from=step, outputs=sys.argv[1])
    for number in (step + 1, step + 2):
        tracker.log(number, {"loss": number / 2, "eval/pass@1": float("nan")})
    tracker.close()
    end(run, ["mlflow"], status="preempted" if step == 0 else "finished", outputs=sys.argv[1])
"""


@pytest.mark.exhaustive
def test_mlflow_continues_its_run_in_a_local_database(tmp_path):
    pytest.importorskip("mlflow", reason="needs the mlflow extra")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MLFLOW_TRACKING_URI": ""}
    subprocess.run([sys.executable, "-c", MLFLOW, str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=240)
    # MLflow's own client reads the database.
    code = """
import json, sys
from mlflow.tracking import MlflowClient
client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
(run,) = client.search_runs([client.get_experiment_by_name("maxhydra").experiment_id])
history = [(metric.step, metric.value) for metric in client.get_metric_history(run.info.run_id, "loss")]
facts = json.load(open(f"{sys.argv[1]}/a/run.json"))
files = sorted(file.path for file in client.list_artifacts(run.info.run_id))
sample = open(client.download_artifacts(run.info.run_id, "sample.txt")).read()
print(json.dumps([history, run.info.run_id == facts["trackers"]["mlflow"]["id"], run.info.status, files, sample,
                  run.data.params["model.emb_dim"], sorted(run.data.metrics)]))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=tmp_path)
    history, is_same, status, files, sample, width, names = json.loads(done.stdout.splitlines()[-1])
    assert history == [[1, 0.5], [2, 1.0], [3, 1.5]], "a repeated step has one value"
    assert is_same and status == "FINISHED" and sample == "To be" and width == "4"
    assert files == ["config.yaml", "rollouts_train.json", "sample.txt"] and names == ["eval/pass_at_1", "loss"]


TRACKIO = MLFLOW.replace("mlflow", "trackio")


@pytest.mark.exhaustive
def test_trackio_continues_its_run_in_a_local_folder(tmp_path):
    pytest.importorskip("trackio", reason="needs the trackio extra")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "store")}
    subprocess.run([sys.executable, "-c", TRACKIO, str(tmp_path)], cwd=ROOT, env=environment, check=True, timeout=240)
    code = """
import json, sys, trackio
(run,) = trackio.Api().runs("maxhydra")
facts = json.load(open(f"{sys.argv[1]}/a/run.json"))
rows = trackio.SQLiteStorage.get_logs("maxhydra", run.name)
print(json.dumps([[(row["step"], row["loss"]) for row in rows if "loss" in row], run.name,
                  facts["trackers"]["trackio"]["name"], sorted({name for row in rows for name in row})]))
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    history, name, recorded, names = json.loads(done.stdout.splitlines()[-1])
    assert history == [[1, 0.5], [2, 1.0], [3, 1.5]], "a repeated step has one value"
    assert name == recorded and {"sample", "rollouts/train"} <= {*names}


@pytest.mark.slow
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch):
    for backend, package in (("tensorboard", "tensorboardX"), ("wandb", "wandb")):
        # None makes an import fail.
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError) as error:
            session(tmp_path / backend, [backend])
        assert f"pip install 'maxhydra[{backend}]'" in str(error.value) and "tracker.backends=" in str(error.value)


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


class Hanging:
    """A tracker whose server does not respond."""

    released = threading.Event()

    def __init__(self, session):
        if session.config.tracker.project == "never":
            self.released.wait(240)

    def log(self, step, metrics):
        self.released.wait(240)

    def close(self):
        pass


HANGING = "tests.train.test_trackers:Hanging"


def test_a_hanging_tracker_does_not_stop_the_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(trackers, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(trackers, "QUEUED_CALLS", 4)
    run, tracker = session(tmp_path / "a", [HANGING, "tensorboard"])
    with logging_to(None, console=True):
        for step in range(8):
            tracker.log(step, {"loss": float(step)})
            wait_for(tracker._threads[1]._calls.empty)
        tracker.close()
    assert not Hanging.released.is_set() and tracker._threads[0]._thread.is_alive()
    tracker._threads[1]._thread.join(240)
    assert f"{HANGING} does not respond; metrics.jsonl has them all" in capsys.readouterr().err
    values = [value.simple_value for event in events(run.path / "tensorboard") for value in event.summary.value]
    assert values.count(7.0) == 1, "the other tracker has every step"
    Hanging.released.set()


def test_a_tracker_that_does_not_start_is_a_clear_error(tmp_path, monkeypatch):
    Hanging.released.clear()
    monkeypatch.setattr(trackers, "OPEN_SECONDS", 0.1)
    with pytest.raises(ConfigError, match=r"Hanging did not start within 0.1 seconds"):
        session(tmp_path / "a", [HANGING], project="never")
    Hanging.released.set()


def test_an_address_with_a_password_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match=r"tracker.uri: looks like a key"):
        session(tmp_path / "a", ["mlflow"], uri="https://user:hunter2hunter2@host/mlflow")
