"""Sweeps on a real SLURM cluster: arrays, several nodes, signals and requeues, a killed controller, cancelling."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from maxhydra.cli import main
from maxhydra.sweep.plan import read_plan
from maxhydra.sweep.run import resume_sweep
from tests.support import callbacks
from tests.support.cli import SMALL, facts, losses, run, run_ok, start, start_silent
from tests.support.polling import wait_for
from tests.support.programs import SEARCH_WORKER, Released, write_program
from tests.support.slurm import cluster, require

WORKER = """
folder=$(dirname "$4")
count=${SLURM_RESTART_COUNT:-0}
echo $count >> "$folder/starts"
trap 'echo received SIGUSR1; exit 138' USR1
case "$folder-$count" in
  *seed=1-0) exit 138;; *seed=1-1) exit 143;; *seed=3-*) exit 138;;
  *seed=2-0) for _ in $(seq 500); do sleep 0.2; done;;
esac
"""
LAUNCHER = ["-m", "hydra/launcher=slurm", "hydra.launcher.poll_seconds=1"]
# With a constant learning rate, runs of different lengths share a compiled step.
TRAIN = [*SMALL, "optimizer/schedule=constant", "train.eval_batches=0"]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require()
    with cluster(tmp_path_factory.mktemp("cluster")) as extra:
        yield extra


def output_of(*arguments: str, scheduler: dict[str, str]) -> str:
    return subprocess.run(arguments, env={**os.environ, **scheduler}, capture_output=True, text=True, check=True).stdout


def wait_until_all_ended(scheduler: dict[str, str], seconds: float) -> None:
    """Wait for all jobs. SLURM delays a requeued job by two minutes, which an administrator, as here, can shorten.

    But not below some seconds: a node rejects the credential of a job that has just ended.
    """
    requeued_at: dict[str, float] = {}

    def have_ended() -> bool:
        lines = output_of("squeue", "-hr", "--states=all", "-o", "%i|%T|%r", scheduler=scheduler).splitlines()
        jobs = [line.split("|") for line in lines]
        for identity, _, reason in jobs:
            if reason != "BeginTime":
                requeued_at.pop(identity, None)
            elif time.monotonic() - requeued_at.setdefault(identity, time.monotonic()) > 4:
                output_of("scontrol", "update", f"JobId={identity}", "StartTime=now", scheduler=scheduler)
        return all(state in ("COMPLETED", "FAILED", "CANCELLED") for _, state, _ in jobs)

    wait_for(have_ended, seconds)


def sessions(folder: Path) -> list[str]:
    return [session["status"] for session in facts(folder)["sessions"]]


@pytest.mark.exhaustive
def test_three_jobs_outlive_their_controller(
    scheduler: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The controller is killed while jobs wait and run; the next finds all of them, and none is lost or duplicated."""
    seeds = "run.seed=1,2,3"
    launcher = [*LAUNCHER, "hydra.launcher.array_parallelism=2"]
    arguments = [*launcher, *TRAIN, "train.steps=4", "run.name=three", seeds, callbacks.override("Held")]
    sweep = tmp_path / "outputs" / "three"
    controller = start_silent(*arguments, cwd=tmp_path, **scheduler)
    wait_for(lambda: list(sweep.glob("*/run.json")))
    controller.kill()
    controller.wait()
    status = run_ok("sweep", "status", "three", cwd=tmp_path, **scheduler).stdout
    assert "PENDING (JobArrayTaskLimit)" in status and "RUNNING" in status
    for name, value in scheduler.items():
        monkeypatch.setenv(name, value)
    output = Released(sweep, count=2)
    resume_sweep(read_plan(sweep), output.append)
    assert sum("found running" in line for line in output) >= 2 and output[-1].startswith("3 finished"), output
    folders = sorted(path.parent for path in sweep.glob("*/run.json"))
    assert [folder.name for folder in folders] == [f"{index}_seed={index + 1}" for index in range(3)]
    assert [sessions(folder) for folder in folders] == [["finished"]] * 3
    assert all(list(losses(folder)) == [1, 2, 3, 4] for folder in folders)
    ids = {facts(folder)["variables"]["SLURM_ARRAY_JOB_ID"] for folder in folders}
    assert len(ids) == 1, "one array, submitted once"
    again = run_ok("sweep", "resume", "three", cwd=tmp_path, **scheduler).stdout
    assert again.strip() == "3 finished", "nothing is left to run"


@pytest.mark.exhaustive
def test_two_preempted_nodes_equal_one_process(scheduler: dict[str, str], tmp_path: Path) -> None:
    """Detached; SIGUSR1 makes it save, as before a time limit; it is requeued, and finishes without a controller."""
    arguments = [*TRAIN, "train.steps=80", "mesh.fsdp=2", "train.per_device_batch_size=4", "checkpoint.every=1000"]
    launcher = [*LAUNCHER, "hydra.launcher.nodes=2", "hydra.launcher.detach=true"]
    done = run_ok(*launcher, *arguments, "run.name=two", cwd=tmp_path, **scheduler)
    identity = re.search(r"job 0: slurm (\d+) ", done.stdout)
    assert identity is not None, done.stdout
    folder = tmp_path / "outputs" / "two" / "0"
    tail = run("runs", "tail", "two/0", cwd=tmp_path, **scheduler)
    assert tail.returncode == 0, "the console can be shown before the run has a log"
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size)
    output_of("scancel", "--signal=USR1", identity[1], scheduler=scheduler)
    run_ok(*arguments, "run.name=one", cwd=tmp_path, devices=2)
    wait_until_all_ended(scheduler, 240)
    run_facts = facts(folder)
    assert sessions(folder) == ["preempted", "finished"], (folder / "console.txt").read_text()
    assert run_facts["processes"] == 2 and run_facts["variables"]["SLURM_RESTART_COUNT"] == "1"
    assert "SIGUSR1" in run_facts["sessions"][0]["reason"]
    one, two = losses(tmp_path / "outputs" / "one"), losses(folder)
    assert list(one) == list(two) == list(range(1, 81))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=TOLERANCE)


@pytest.mark.exhaustive
def test_a_cancelled_sweep_can_be_resumed(
    scheduler: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Running jobs save and exit, queued ones leave the queue, the controller exits; and all of it can be resumed."""
    arguments = [*TRAIN, "train.steps=300", "checkpoint.every=1000", "run.name=off"]
    launcher = [*LAUNCHER, "hydra.launcher.array_parallelism=1"]
    with open(tmp_path / "console", "w") as console, open(os.devnull) as null:
        streams = (null, console, console)
        controller = start(*launcher, *arguments, "run.seed=1,2", cwd=tmp_path, streams=streams, **scheduler)
    first, second = (tmp_path / "outputs" / "off" / name for name in ("0_seed=1", "1_seed=2"))
    wait_for(lambda: (first / "metrics.jsonl").exists() and (first / "metrics.jsonl").stat().st_size)
    for name, value in scheduler.items():
        monkeypatch.setenv(name, value)
    # In this process, because starting another one would take as long as the job.
    assert main.run(["sweep", "cancel", "off", "--outputs", str(tmp_path / "outputs")]) == 0
    assert controller.wait(240) == 1 and "cancelled" in (tmp_path / "console").read_text()
    # While the first job still saves: it is not taken for a running one.
    run_ok("sweep", "resume", "off", "--detach", cwd=tmp_path, **scheduler)
    assert not (second / "run.json").exists()
    done = run_ok("sweep", "resume", "off", cwd=tmp_path, **scheduler).stdout
    assert done.rstrip().endswith("2 finished")
    assert sessions(first) == ["preempted", "finished"] and sessions(second) == ["finished"]
    assert list(losses(first)) == list(range(1, 301))
    assert json.loads((first / "job.json").read_text())["overrides"][-1] == "run.name='0_seed=1'"


@pytest.mark.exhaustive
def test_jobs_of_an_array_are_requeued_individually(scheduler: dict[str, str], tmp_path: Path) -> None:
    """With a fake worker: interrupted twice and then done; near its time limit; interrupted too often."""
    worker = write_program(tmp_path / "worker", "/bin/bash", WORKER)
    options = ["hydra.launcher.detach=true", "hydra.launcher.max_requeues=2", f"hydra.launcher.python={worker}"]
    options += ["hydra.launcher.time=1", "hydra.launcher.save_seconds=57"]
    run_ok(*LAUNCHER, *options, "run.name=array", "run.seed=1,2,3", cwd=tmp_path, **scheduler)
    folders = [tmp_path / "outputs" / "array" / f"{index}_seed={index + 1}" for index in range(3)]
    wait_until_all_ended(scheduler, 120)
    assert [(folder / "starts").read_text().split() for folder in folders] == [
        ["0", "1", "2"],
        ["0", "1"],
        ["0", "1", "2"],
    ]
    assert "received SIGUSR1" in (folders[1] / "console.txt").read_text()
    assert "max_requeues=2" in (folders[2] / "console.txt").read_text()


@pytest.mark.slow
def test_a_search_prunes_bad_jobs(scheduler: dict[str, str], tmp_path: Path) -> None:
    """With a fake worker that writes runs as training does, and saves on SIGTERM."""
    worker = write_program(tmp_path / "worker", sys.executable, SEARCH_WORKER)
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.sampler=grid",
        "hydra.sweeper.workers=2",
        "hydra.sweeper.pruner=asha",
    ]
    rates = "optimizer.learning_rate=0.3,0.5,1,2"
    arguments = [*LAUNCHER, *search, f"hydra.launcher.python={worker}", "run.name=search", rates]
    done = run_ok(*arguments, cwd=tmp_path, **scheduler).stdout
    statuses = [facts(path)["status"] for path in sorted((tmp_path / "outputs" / "search").glob("[0-9]_*"))]
    pruned = statuses.count("pruned")
    assert pruned >= 1 and statuses.count("finished") == 4 - pruned, done
    assert f"{4 - pruned} finished, {pruned} pruned" in done and "optimizer.learning_rate=0.3" in done


@pytest.mark.slow
def test_errors_of_the_cluster_are_one_line(scheduler: dict[str, str], tmp_path: Path) -> None:
    arguments = [*LAUNCHER, "debug=one_step", "run.name=rejected", "run.seed=1,2"]
    done = run(*arguments, "hydra.launcher.partition=nowhere", cwd=tmp_path, **scheduler)
    assert done.returncode == 2 and "nowhere" in done.stderr and "Traceback" not in done.stderr
    assert not list(tmp_path.glob("outputs/*/*/.job.json")), "no job is recorded as submitted"
    assert run_ok("sweep", "status", "rejected", cwd=tmp_path, **scheduler).stdout == "2 not started\n"
