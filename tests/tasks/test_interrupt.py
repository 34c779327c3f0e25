"""Interrupted and repeated commands end where one uninterrupted command ends, and record truthfully what ended them."""

import importlib.util
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from maxhydra.record.rollout_store import search
from maxhydra.record.rollouts import Query
from tests.support import callbacks, cli
from tests.support.cli import ROOT, SMALL, facts, parameter_hash, run, run_ok

RUN = [*SMALL, "train.steps=6", "checkpoint.every=2", "optimizer/schedule=constant", "run.name=it"]
RUN += ["train.eval_every=2"]
SAMPLE = ["train.sample.tokens=8", "train.sample.prompt='1+1='", "train.sample.at_evaluations=true"]


def rows(folder: Path) -> list[tuple[int, Any, Any]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["step"], line.get("loss"), line.get("eval/loss")) for line in lines]


def signal_when(arguments: Sequence[str], is_due: Callable[[], bool], number: int, *, cwd: Path, **extra: str) -> int:
    """Start a command and send it a signal at a moment; returns the exit code."""
    process = cli.start_silent(*arguments, cwd=cwd, **extra)
    while process.is_running() and not is_due():
        time.sleep(0.002)
    assert process.is_running(), "the process ended before the signal"
    process.signal(number)
    return process.wait(240)


def forget_the_end(folder: Path, *names: str) -> None:
    """Turn run.json into that of a run that was killed after its last save."""
    content = {name: value for name, value in facts(folder).items() if name not in names}
    content.update(status="running", reason=None, finished=None)
    content["sessions"][-1] |= {"status": "running", "ended": None, "pid": 2**22, "pid_started": None}
    del content["sessions"][-1]["seconds"]
    (folder / "run.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Outputs with a finished run that has a sample."""
    cwd = tmp_path_factory.mktemp("finished")
    run_ok(*RUN, *SAMPLE, cwd=cwd)
    return cwd / "outputs"


def repeat(arguments: list[str], cwd: Path) -> None:
    """Run a command that has finished, and assert that it changes no record."""
    files = [*cwd.glob("outputs/**/run.json"), *cwd.glob("outputs/**/metrics.jsonl")]
    before = {path: path.read_bytes() for path in files}
    run_ok(*arguments, cwd=cwd)
    assert before and {path: path.read_bytes() for path in files} == before


@pytest.mark.slow
def test_the_same_command_on_a_finished_run_changes_nothing(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "outputs")
    repeat([*RUN, *SAMPLE], tmp_path)


@pytest.mark.exhaustive
def test_the_same_command_on_a_finished_sweep_changes_nothing(tmp_path: Path) -> None:
    sweep = [*RUN, "-m", "run.name=sweep", "train.steps=2", "run.seed=1,2"]
    run_ok(*sweep, cwd=tmp_path)
    repeat(sweep, tmp_path)
    status = run_ok("sweep", "status", "sweep", cwd=tmp_path).stdout
    assert status.count("finished  eval/loss") == 2, status


@pytest.mark.slow
def test_a_run_killed_after_its_last_save_is_completed_with_its_values(finished: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(finished, tmp_path / "outputs") / "it"
    whole = facts(folder)
    assert whole["objective"]["value"] is not None and whole["sample"]
    forget_the_end(folder, "objective", "metrics", "sample")
    run_ok(*RUN, *SAMPLE, cwd=tmp_path)
    for name in ("status", "reason", "objective", "metrics", "sample", "end_step", "trained_parameters"):
        assert facts(folder)[name] == whole[name], name


def test_samples_of_evaluations_are_rollouts(finished: Path) -> None:
    records = search(finished / "it" / "rollouts", Query(kind="eval", order="oldest")).records
    texts = [record["prompt"] + record["completion"] for record in records]
    assert [record["step"] for record in records] == [2, 4, 6]
    assert len(set(texts)) > 1 and texts[-1] == facts(finished / "it")["sample"]


EARLY_STOP = ["train.early_stop.patience=2", "train.early_stop.min_delta=100"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("end", [EARLY_STOP, ["train.target_eval_loss=1000"]])
def test_a_run_that_ended_early_does_not_train_on(tmp_path: Path, end: list[str]) -> None:
    """The first kill, of the run that counts evaluations, is after that of step 0; the second after the last save."""
    arguments = [*RUN, *end, "train.eval_start=true", "checkpoint.every=100"]
    folder, whole = tmp_path / "outputs" / "it", tmp_path / "outputs" / "whole"
    run_ok(*arguments, "run.name=whole", cwd=tmp_path)
    last_step = facts(whole)["end_step"]
    assert last_step < 6
    if end == EARLY_STOP:
        killed = run(*arguments, callbacks.override("SignalItself", signal="SIGKILL"), cwd=tmp_path)
        assert killed.returncode == -signal.SIGKILL and [step for step, *_ in rows(folder)] == [0]
        run_ok(*arguments, cwd=tmp_path)
        assert rows(folder) == rows(whole)
    else:
        shutil.copytree(whole, folder)
    forget_the_end(folder, "objective", "metrics")
    run_ok(*arguments, cwd=tmp_path)
    assert rows(folder) == rows(whole)
    assert parameter_hash(folder, last_step) == parameter_hash(whole, last_step)
    for name in ("status", "reason", "objective", "end_step"):
        assert facts(folder)[name] == facts(whole)[name]


def has_row(folder: Path, step: int) -> bool:
    return (folder / "metrics.jsonl").exists() and f'"step": {step}' in (folder / "metrics.jsonl").read_text()


@pytest.mark.exhaustive
def test_a_signal_abandons_an_evaluation_which_is_repeated(tmp_path: Path) -> None:
    number = signal.SIGHUP
    arguments = [*RUN, "train.steps=4", "train.eval_batches=40", "data.eval_fraction=0.9", "checkpoint.every=100"]
    folder, whole = tmp_path / "outputs" / "it", tmp_path / "outputs" / "whole"
    code = signal_when(arguments, lambda: has_row(folder, 2), number, cwd=tmp_path)
    assert code == 128 + number
    assert facts(folder)["status"] == "preempted"
    assert facts(folder)["reason"] == f"{number.name} at step 2, during its evaluation"
    run_ok(*arguments, cwd=tmp_path)
    run_ok(*arguments, "run.name=whole", cwd=tmp_path)
    assert rows(folder) == rows(whole)
    assert parameter_hash(folder, 4) == parameter_hash(whole, 4)


def blocked(record: dict[str, Any]) -> dict[str, Any]:
    """A formatting function that never returns."""
    time.sleep(600)
    return record


@pytest.mark.slow
def test_a_signal_before_the_first_step_ends_at_once(tmp_path: Path) -> None:
    """The data never arrives, so that neither the main thread nor the thread it waits for can react."""
    (tmp_path / "r.jsonl").write_text('{"text": "a"}\n' * 400)
    data = ["data=grain", "data.path=r.jsonl", "data.formatting=tests.tasks.test_interrupt:blocked"]
    folder = tmp_path / "outputs" / "it"
    code = signal_when(
        [*RUN, *data],
        lambda: (folder / "run.json").exists(),
        signal.SIGUSR1,
        cwd=tmp_path,
    )
    assert code == 138
    assert facts(folder)["status"] == "preempted" and facts(folder)["reason"].startswith("SIGUSR1")


@pytest.mark.exhaustive
def test_a_signal_during_the_sample_leaves_only_the_sample_to_be_done(tmp_path: Path) -> None:
    arguments, folder = [*RUN, *SAMPLE, "train.sample.tokens=100"], tmp_path / "outputs" / "it"
    checkpoint = folder / "checkpoints" / "6"
    code = signal_when(arguments, checkpoint.exists, signal.SIGTERM, cwd=tmp_path)
    assert code == 143 and facts(folder)["reason"] == "SIGTERM during the final sample"
    before = rows(folder)
    run_ok(*arguments, cwd=tmp_path)
    assert facts(folder)["status"] == "finished" and facts(folder)["sample"] and rows(folder) == before


@pytest.mark.exhaustive
def test_random_kills(tmp_path: Path) -> None:
    """The short form of scripts/kill_runs.py. Other tests kill training, early stopping and task=tokenize."""
    spec = importlib.util.spec_from_file_location("kill_runs", ROOT / "scripts" / "kill_runs.py")
    assert spec is not None and spec.loader is not None
    kill_runs = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(kill_runs)
    harness = kill_runs.Harness(tmp_path, lambda arguments, cwd: cli.start_silent(*arguments, cwd=cwd))
    harness.prepare(weights=False)
    trial = harness.trial("train_tokenizer", harness.reference("train_tokenizer"), os.getpid())
    assert not trial.differences, trial


@pytest.mark.exhaustive
def test_a_signal_to_one_of_two_processes_ends_both_with_a_checkpoint(tmp_path: Path) -> None:
    """Process 1 gets it and process 0 writes run.json. The same commands resume."""
    arguments = [*RUN, "train.steps=3000", "train.eval_every=0", "train.eval_batches=0", "checkpoint.every=100000"]
    arguments += ["mesh.data=2", "train.per_device_batch_size=2"]
    folder = tmp_path / "outputs" / "it"
    processes = cli.start_processes(2, *arguments, cwd=tmp_path)
    while all(process.is_running() for process in processes) and not has_row(folder, 1):
        time.sleep(0.005)
    processes[1].signal(signal.SIGTERM)
    assert [process.wait(240) for process in processes] == [143] * 2
    record = facts(folder)
    assert record["status"] == "preempted" and record["reason"].startswith("SIGTERM"), record["reason"]
    steps = max(int(path.name) for path in (folder / "checkpoints").iterdir())
    assert steps == record["sessions"][-1]["end_step"]
    finished = [
        process.wait(240) for process in cli.start_processes(2, *arguments, f"train.steps={steps + 5}", cwd=tmp_path)
    ]
    assert finished == [0, 0] and facts(folder)["status"] == "finished"
    assert [session["start_step"] for session in facts(folder)["sessions"]][-1] == steps
