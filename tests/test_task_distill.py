"""task=distill and task=teacher_logits as a user runs them: nearer to the teacher than by the data alone, and after
kills the same as without."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from running import ROOT, SMALL, command, environment, finished, losses, parameter_hash, run

from maxhydra.config.compose import from_yaml
from maxhydra.convert import load_weights
from maxhydra.data.formats.arrayrecord import ArrayRecordFile
from maxhydra.layers import Context
from maxhydra.model import build
from maxhydra.sharding import Sharder

DATA = ["data=grain", "data.path=text.jsonl", "data.eval_fraction=0.1", *SMALL]
STEPS = 24
STUDENT = [
    *("task=distill", "task.teacher.weights=outputs/teacher", "task.temperature=2", "task.temperature_end=1"),
    *(*DATA, "model.num_layers=1", f"train.steps={STEPS}", "checkpoint.every=8", "train.loss_chunk=8"),
]
LOGITS = [
    *("task=teacher_logits", "checkpoint.load_parameters=outputs/teacher", "task.output=logits", "task.k=5"),
    *("task.shards=4", *DATA),
]


@pytest.fixture(scope="module")
def cwd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a text and a teacher that was trained on it."""
    folder = tmp_path_factory.mktemp("school")
    lines = (ROOT / "maxhydra/data/text/shakespeare.txt").read_text().splitlines()[300:1500]
    texts = ["\n".join(lines[at : at + 8]) for at in range(0, len(lines), 8)]
    (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    finished(*DATA, "train.steps=80", "run.name=teacher", cwd=folder)
    return folder


def last(folder: Path) -> dict[str, float]:
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])


def kill_when(arguments: list[str], cwd: Path, sign: Path) -> None:
    """Start a command and kill -9 it as soon as a file has something in it."""
    process = subprocess.Popen(
        command(*arguments), cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (sign.exists() and sign.stat().st_size):
        time.sleep(0.002)
    assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_nearer_to_the_teacher_than_by_the_data_alone_and_the_same_after_a_kill(cwd: Path) -> None:
    outputs = cwd / "outputs"
    finished(*STUDENT, "run.name=whole", cwd=cwd)
    finished(*STUDENT, "task.alpha=0", "run.name=data", cwd=cwd)
    assert last(outputs / "whole")["eval/kl"] < last(outputs / "data")["eval/kl"] - 0.01
    assert losses(outputs / "whole")[STEPS] < losses(outputs / "whole")[1]

    kill_when([*STUDENT, "run.name=killed"], cwd, outputs / "killed" / "metrics.jsonl")
    finished(*STUDENT, "run.name=killed", cwd=cwd)
    assert losses(outputs / "killed") == losses(outputs / "whole")
    assert parameter_hash(outputs / "killed", STEPS) == parameter_hash(outputs / "whole", STEPS)


@pytest.mark.slow
def test_logits_in_files(cwd: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Written in two sessions, they are the teacher's own, and a student learns from them."""
    kill_when(LOGITS, cwd, cwd / "logits" / "index.json")
    assert not json.loads((cwd / "logits" / "index.json").read_text())["complete"]
    finished(*LOGITS, cwd=cwd)
    index = json.loads((cwd / "logits" / "index.json").read_text())
    assert index["complete"] and len(index["shards"]) == 4

    monkeypatch.chdir(cwd)
    teacher = from_yaml((cwd / "outputs" / "teacher" / "config.yaml").read_text()).model
    model = build(teacher)
    weights = load_weights(str(cwd / "outputs" / "teacher"), model, shardings=None, dtype=jnp.float32)
    file = ArrayRecordFile(str(sorted((cwd / "logits").glob("*.array_record"))[1]))
    record = file.read([3])[0]
    tokens = jnp.asarray(record["tokens"][:-1][None].astype(np.int32))
    context = Context(
        positions=jnp.arange(tokens.shape[1])[None],
        segments=None,
        sharder=Sharder.single(),
        cache=None,
        dropout_key=None,
    )
    hidden, _ = model.hidden(weights, tokens, context)
    expected = np.asarray(jax.nn.log_softmax(model.logits(weights, hidden, Sharder.single())))[0]
    assert record["teacher_ids"].shape == (len(expected), 5)
    np.testing.assert_allclose(record["teacher_logits"], -np.sort(-expected, -1)[:, :5], atol=0.01)
    taken = np.take_along_axis(expected, record["teacher_ids"].astype(np.int64), -1)
    np.testing.assert_allclose(record["teacher_logits"], taken, atol=0.01)

    offline = [*SMALL, "data=grain", "data.path=logits", "data.shape=teacher", "model.num_layers=1"]
    finished("task=distill", *offline, "train.steps=12", "run.name=offline", cwd=cwd)
    seen = losses(cwd / "outputs" / "offline")
    assert seen[12] < seen[1] - 0.3 and last(cwd / "outputs" / "offline")["eval/kl"] > 0


def test_refused(cwd: Path) -> None:
    done = run(*STUDENT, "model.vocab_size=300", "run.name=other", cwd=cwd)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert "has a vocabulary of 320, the student's is 300" in done.stderr
    assert not (cwd / "outputs" / "other").exists()
