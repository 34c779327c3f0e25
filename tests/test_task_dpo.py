"""task=dpo as a user runs it: it begins at ln 2, learns what is preferred, survives kills, refuses what is wrong."""

import json
import math
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from running import SMALL, command, environment, facts, finished, losses, parameter_hash, run

from maxhydra.config.tasks.dpo import DpoTask, PreferenceLoss, Reference

STEPS = 24
RUN = [
    "task=dpo",
    "data=grain",
    "data.path=pairs.jsonl",
    "data.shape=preference",
    "data.eval_fraction=0.094",
    *SMALL,
    f"train.steps={STEPS}",
    "checkpoint.every=8",
    "train.loss_chunk=8",
    "run.name=it",
]


def write_pairs(folder: Path) -> Path:
    """A person asks for a word; it should come in small letters. 96 pairs, and 10 held out."""
    rng = random.Random(0)
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(106)]
    lines = [{"prompt": f"Say {word}: ", "chosen": word, "rejected": word.upper()} for word in words]
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cwd = tmp_path_factory.mktemp("whole")
    write_pairs(cwd)
    finished(*RUN, cwd=cwd)
    return cwd / "outputs" / "it"


def test_it_begins_at_ln_2_and_learns_the_preference(whole: Path) -> None:
    rows = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-4)
    last = rows[-1]
    assert last["eval/accuracy"] > 0.9 and last["eval/reward_margin"] > 0.3
    assert last["eval/tokens"] == 10, "pairs; the rest of the second batch only fills it up"


def kill_when(cwd: Path, sign: Path) -> None:
    """Start the run and kill -9 it as soon as a file has something in it."""
    before = sign.stat().st_size if sign.exists() else 0
    process = subprocess.Popen(
        command(*RUN), cwd=cwd, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not (sign.exists() and sign.stat().st_size > before):
        time.sleep(0.002)
    assert process.poll() is None, "it ended before it could be killed"
    os.kill(process.pid, signal.SIGKILL)
    process.wait()


@pytest.mark.slow
def test_kills_change_no_bit(whole: Path, tmp_path: Path) -> None:
    """One while the reference is asked, with an entry cut short, and one while training."""
    write_pairs(tmp_path)
    folder = tmp_path / "outputs" / "it"
    cache = folder / "reference" / "0.logprobs"
    kill_when(tmp_path, cache)
    os.truncate(cache, cache.stat().st_size - 5)
    kill_when(tmp_path, folder / "metrics.jsonl")
    finished(*RUN, cwd=tmp_path)
    assert losses(folder) == losses(whole)
    assert parameter_hash(folder, STEPS) == parameter_hash(whole, STEPS)
    assert sorted_entries(cache) == sorted_entries(whole / "reference" / "0.logprobs")
    assert facts(folder)["status"] == "finished"


def sorted_entries(path: Path) -> list[bytes]:
    content = path.read_bytes()
    return sorted(content[at : at + 40] for at in range(0, len(content), 40))


def test_with_an_adapter_the_model_without_it_is_the_reference(tmp_path: Path) -> None:
    write_pairs(tmp_path)
    finished(*RUN, "adapter=lora", "optimizer.learning_rate=0.02", cwd=tmp_path)
    folder = tmp_path / "outputs" / "it"
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert rows[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert rows[-1]["eval/accuracy"] > 0.9
    assert not (folder / "reference").exists()


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["data.shape=text", "task.reference=adapter_off", "train.z_loss=0.1"],
            ["data.shape=text: is not what task=dpo learns from", "needs an adapter to leave out", "train.z_loss=0.1"],
        ),
        (["+data.columns.chosen=better"], ["no column 'better'; it has 'prompt', 'chosen', 'rejected'; expected:"]),
    ],
)
def test_refused(tmp_path: Path, overrides: list[str], messages: list[str]) -> None:
    write_pairs(tmp_path)
    done = run(*RUN, *overrides, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert all(message in done.stderr for message in messages), done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "outputs" / "it").exists()


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"loss": PreferenceLoss.orpo, "reference": Reference.cached}, "reference"),
        ({"reference": Reference.none}, "reference"),
        ({"loss": PreferenceLoss.simpo}, "margin"),
        ({"margin": 0.5}, "margin"),
        ({"loss": PreferenceLoss.ipo, "label_smoothing": 0.1}, "label_smoothing"),
    ],
)
def test_fields_that_do_not_go_together(fields: dict[str, Any], path: str) -> None:
    assert [problem.path for problem in DpoTask(**fields).check()] == [path]
