"""Runs with objects of the user: source, loss, optimizer, layer, tracker, callbacks and task."""

import json
from pathlib import Path

import pytest

from tests.support.cli import ROOT, SMALL, facts, losses, parameter_hash, run, run_ok

OBJECTS = "tests.support.plug_ins"
KIND = "model.kinds.layer"
OWN = [
    *(f"data.source={OBJECTS}:counting", "data.options.records=300"),
    *("optimizer=function", f"optimizer.function={OBJECTS}:scale_by_sign", "optimizer.options.decay=0.5"),
    *(f"train.loss.function={OBJECTS}:smooth_loss", "optimizer.learning_rate=1e-3"),
    *(f"{KIND}.feed_forward=own_feed_forward", f"{KIND}.own_feed_forward.function={OBJECTS}:square_feed_forward"),
    f"{KIND}.own_feed_forward.options.dim=24",
]
OBSERVED = [
    f"+train.callbacks={{log: {{function: '{OBJECTS}:EventLog', options: {{file: callback.jsonl}}}}}}",
    *(f"tracker.backends=[{OBJECTS}:FileTracker]", "tracker.options.file=tracker.jsonl"),
]
RUN = [*SMALL, *OWN, "train.steps=4", "optimizer.schedule.steps=4", "checkpoint.every=2", "checkpoint.keep=5"]


def lines(path: Path) -> list[list]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.exhaustive
def test_a_run_of_the_users_objects_is_observed_and_resumes_exactly(tmp_path: Path) -> None:
    plain, observed = tmp_path / "outputs" / "plain", tmp_path / "outputs" / "observed"
    run_ok(*RUN, "run.name=plain", cwd=tmp_path)
    run_ok(*RUN, *OBSERVED, "train.steps=2", "run.name=observed", cwd=tmp_path)
    run_ok(*RUN, *OBSERVED, "run.name=observed", cwd=tmp_path)
    # Callbacks that clear their arguments, and a resume, change nothing.
    assert losses(observed) == losses(plain) and parameter_hash(observed, 4) == parameter_hash(plain, 4)
    events = lines(observed / "callback.jsonl")
    assert [event[:2] for event in events if event[0] != "evaluation"] == [
        *(["begin"], ["step", 1], ["step", 2], ["save", 2], ["end", "finished"]),
        *(["begin"], ["step", 3], ["step", 4], ["save", 4], ["end", "finished"]),
    ]
    assert {event[1]: event[2] for event in events if event[0] == "step"} == losses(plain)
    tracked = lines(observed / "tracker.jsonl")
    assert [entry[1] for entry in tracked if entry[0] == "outcome"] == ["finished", "finished"]
    assert {"data.source", "train.loss.function", "optimizer.function"} <= {
        key for kind in facts(observed)["inputs"].values() for key in kind
    }
    changed = run(*RUN, *OBSERVED, "data.options.records=200", "train.steps=6", "run.name=observed", cwd=tmp_path)
    assert changed.returncode == 2 and "data.options.records" in changed.stderr, changed.stderr


@pytest.mark.exhaustive
def test_changed_code_is_noticed_when_a_run_resumes(tmp_path: Path) -> None:
    (tmp_path / "own_source.py").write_text(f"from {OBJECTS} import counting\n")
    command = [*SMALL, "data.source=own_source:counting", "train.steps=2", "run.name=a"]
    path = f"{ROOT}:{tmp_path}"
    run_ok(*command, cwd=tmp_path, PYTHONPATH=path)
    (tmp_path / "own_source.py").write_text(f"from {OBJECTS} import counting  # changed\n")
    done = run(*command, "train.steps=3", cwd=tmp_path, PYTHONPATH=path)
    assert done.returncode == 2 and "data.source" in done.stderr and "accept_changed_inputs=[data]" in done.stderr


@pytest.mark.slow
def test_a_task_of_the_user_runs_and_a_failing_callback_fails_the_run(tmp_path: Path) -> None:
    run_ok(f"task.name={OBJECTS}:greet", "task.options.word=hi", "run.name=said", cwd=tmp_path)
    assert (tmp_path / "outputs" / "said" / "greeting.txt").read_text() == "hi"
    assert facts(tmp_path / "outputs" / "said")["metrics"] == {"letters": 2.0}
    callback = f"+train.callbacks={{bad: {{function: '{OBJECTS}:Failing'}}}}"
    done = run(*SMALL, callback, "train.steps=2", "run.name=bad", cwd=tmp_path)
    assert done.returncode == 1 and "in train.callbacks.bad, Failing.step" in done.stderr
    assert facts(tmp_path / "outputs" / "bad")["status"] == "failed"
