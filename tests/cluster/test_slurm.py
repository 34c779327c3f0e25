"""Sweeps on a real SLURM cluster: arrays, several nodes, signals and requeue, a killed controller, cancelling."""

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
from tests.support import compile_cache, fork_server
from tests.support.cli import SMALL, command, environment, facts, finished, losses, run, silent
from tests.support.slurm import cluster, require, wait_for

WORKER = """
folder=$(dirname "$4")
count=${SLURM_RESTART_COUNT:-0}
echo $count >> "$folder/starts"
trap 'echo told by SIGUSR1; exit 138' USR1
case "$folder-$count" in
  *seed=1-0) exit 138;; *seed=1-1) exit 143;; *seed=3-*) exit 138;;
  *seed=2-0) for _ in $(seq 500); do sleep 0.2; done;;
esac
"""
SEARCHED = """
import signal, sys, time
import yaml
from maxhydra.record import MetricsWriter, RunDirectory

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
rate = yaml.safe_load(open(sys.argv[4]))["optimizer"]["learning_rate"]
run = RunDirectory(sys.argv[6])
with run.session("", {}):
    metrics = MetricsWriter(run.metrics_path)
    for step in range(1, 31):
        time.sleep(0.2)
        metrics.write(step, {"eval/loss": rate + 1 / step})
        if asked:
            break
    run.finish("preempted" if asked else "finished", "SIGTERM" if asked else "done")
"""
LAUNCHER = ["-m", "hydra/launcher=slurm", "hydra.launcher.poll_seconds=1"]
TOLERANCE = 2e-5


@pytest.fixture(scope="module")
def scheduler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    require()
    with cluster(tmp_path_factory.mktemp("cluster")) as extra:
        yield extra


def quick(folder: Path) -> str:
    """Jobs that need not import everything first: `python -m maxhydra`, which a warm process does."""
    return f"hydra.launcher.python={fork_server.program(folder / 'python', compile_cache.PREFIX, skipped=2)}"


def program(path: Path, interpreter: str, text: str) -> Path:
    path.write_text(f"#!{interpreter}\n{text}")
    path.chmod(0o755)
    return path


def said(*words: str, scheduler: dict[str, str]) -> str:
    return subprocess.run(words, env={**os.environ, **scheduler}, capture_output=True, text=True, check=True).stdout


def wait_until_all_are_over(scheduler: dict[str, str], seconds: float) -> None:
    """SLURM lets a job that was put back wait for two minutes, which an administrator, as here, can cut short.

    Not below some seconds: a node refuses the credential of a job that it has just seen end.
    """
    put_back: dict[str, float] = {}

    def are_over() -> bool:
        lines = said("squeue", "-hr", "--states=all", "-o", "%i|%T|%r", scheduler=scheduler).splitlines()
        jobs = [line.split("|") for line in lines]
        for identity, _, reason in jobs:
            if reason != "BeginTime":
                put_back.pop(identity, None)
            elif time.monotonic() - put_back.setdefault(identity, time.monotonic()) > 4:
                said("scontrol", "update", f"JobId={identity}", "StartTime=now", scheduler=scheduler)
        return all(state in ("COMPLETED", "FAILED", "CANCELLED") for _, state, _ in jobs)

    wait_for(are_over, seconds)


def sessions(folder: Path) -> list[str]:
    return [session["status"] for session in facts(folder)["sessions"]]


@pytest.mark.slow
def test_six_jobs_outlive_their_controller(scheduler: dict[str, str], tmp_path: Path) -> None:
    """The controller is killed while jobs wait and run; the next finds all of them, and none is lost or doubled."""
    seeds = "run.seed=1,2,3,4,5,6"
    launcher = [*LAUNCHER, "hydra.launcher.array_parallelism=3", quick(tmp_path)]
    asked = [*launcher, *SMALL, "train.steps=4", "run.name=six", seeds]
    sweep = tmp_path / "outputs" / "six"
    controller = silent(*asked, cwd=tmp_path, **scheduler)
    wait_for(lambda: list(sweep.glob("*/run.json")), 120)
    controller.kill()
    controller.wait()
    status = finished("sweep", "status", "six", cwd=tmp_path, **scheduler).stdout
    assert "PENDING (JobArrayTaskLimit)" in status and "RUNNING" in status
    done = finished("sweep", "resume", "six", cwd=tmp_path, **scheduler).stdout
    assert done.count("found running") >= 3 and done.rstrip().endswith("6 finished")
    folders = sorted(path.parent for path in sweep.glob("*/run.json"))
    assert [folder.name for folder in folders] == [f"{index}_seed={index + 1}" for index in range(6)]
    assert [sessions(folder) for folder in folders] == [["finished"]] * 6
    assert all(list(losses(folder)) == [1, 2, 3, 4] for folder in folders)
    ids = {facts(folder)["variables"]["SLURM_ARRAY_JOB_ID"] for folder in folders}
    assert len(ids) == 1, "one array, submitted once"
    again = finished("sweep", "resume", "six", cwd=tmp_path, **scheduler).stdout
    assert again.strip() == "6 finished", "nothing is left to run"


@pytest.mark.slow
def test_two_nodes_are_preempted_and_equal_one_process(scheduler: dict[str, str], tmp_path: Path) -> None:
    """Detached; told by SIGUSR1 to save, as before a time limit; back in the queue, and on to the end by itself."""
    arguments = [*SMALL, "train.steps=150", "mesh.fsdp=2", "train.per_device_batch_size=4", "checkpoint.every=1000"]
    launcher = [*LAUNCHER, "hydra.launcher.nodes=2", "hydra.launcher.detach=true", quick(tmp_path)]
    done = finished(*launcher, *arguments, "run.name=two", cwd=tmp_path, **scheduler)
    identity = re.search(r"job 0: slurm (\d+) ", done.stdout)
    assert identity is not None, done.stdout
    folder = tmp_path / "outputs" / "two" / "0"
    tail = run("runs", "tail", "two/0", cwd=tmp_path, **scheduler)
    assert tail.returncode == 0, "there is a log before there is a run"
    wait_for(lambda: (folder / "metrics.jsonl").exists() and (folder / "metrics.jsonl").stat().st_size, 120)
    said("scancel", "--signal=USR1", identity[1], scheduler=scheduler)
    finished(*arguments, "run.name=one", cwd=tmp_path, devices=2)
    wait_until_all_are_over(scheduler, 240)
    told = facts(folder)
    assert sessions(folder) == ["preempted", "finished"], (folder / "console.txt").read_text()
    assert told["processes"] == 2 and told["variables"]["SLURM_RESTART_COUNT"] == "1"
    assert "SIGUSR1" in told["sessions"][0]["reason"]
    one, two = losses(tmp_path / "outputs" / "one"), losses(folder)
    assert list(one) == list(two) == list(range(1, 151))
    np.testing.assert_allclose(list(two.values()), list(one.values()), rtol=TOLERANCE)


@pytest.mark.slow
def test_a_sweep_is_cancelled_and_gone_on_with(
    scheduler: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs that run save and end, those that wait leave the queue, the controller ends; and all of it goes on."""
    arguments = [*SMALL, "train.steps=300", "checkpoint.every=1000", "run.name=off", "run.seed=1,2"]
    launcher = [*LAUNCHER, "hydra.launcher.array_parallelism=1"]
    env = environment(**scheduler)
    controller = subprocess.Popen(
        command(*launcher, *arguments), cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    first, second = (tmp_path / "outputs" / "off" / name for name in ("0_seed=1", "1_seed=2"))
    wait_for(lambda: (first / "metrics.jsonl").exists() and (first / "metrics.jsonl").stat().st_size, 120)
    for name, value in scheduler.items():
        monkeypatch.setenv(name, value)
    # In this process, which does not have to start first: the job is as quick.
    assert main.run(["sweep", "cancel", "off", "--outputs", str(tmp_path / "outputs")]) == 0
    assert controller.wait(60) == 1 and "cancelled" in controller.communicate()[1]
    wait_for(lambda: sessions(first) == ["preempted"], 60)
    assert not (second / "run.json").exists()
    done = finished("sweep", "resume", "off", cwd=tmp_path, **scheduler).stdout
    assert done.rstrip().endswith("2 finished")
    assert sessions(first) == ["preempted", "finished"] and sessions(second) == ["finished"]
    # Killed at another moment, or never: the same losses.
    finished(*arguments[:-1], "run.name=whole", "run.seed=1", cwd=tmp_path)
    assert losses(first) == losses(tmp_path / "outputs" / "whole")
    assert json.loads((first / "job.json").read_text())["overrides"][-1] == "run.name='0_seed=1'"


def test_jobs_of_an_array_are_put_back_one_by_one(scheduler: dict[str, str], tmp_path: Path) -> None:
    """A worker in place of ours: interrupted twice, and then done; near its time limit; interrupted once too often."""
    worker = program(tmp_path / "worker", "/bin/bash", WORKER)
    asked = ["hydra.launcher.detach=true", "hydra.launcher.max_requeues=2", f"hydra.launcher.python={worker}"]
    asked += ["hydra.launcher.time=1", "hydra.launcher.save_seconds=50"]
    finished(*LAUNCHER, *asked, "run.name=array", "run.seed=1,2,3", cwd=tmp_path, **scheduler)
    folders = [tmp_path / "outputs" / "array" / f"{index}_seed={index + 1}" for index in range(3)]
    wait_until_all_are_over(scheduler, 120)
    assert [(folder / "starts").read_text().split() for folder in folders] == [
        ["0", "1", "2"],
        ["0", "1"],
        ["0", "1", "2"],
    ]
    assert "told by SIGUSR1" in (folders[1] / "console.txt").read_text()
    assert "max_requeues=2" in (folders[2] / "console.txt").read_text()


def test_a_search_ends_what_does_badly(scheduler: dict[str, str], tmp_path: Path) -> None:
    """Jobs of a worker in place of ours, which writes runs as training does, and saves when it is told to."""
    worker = program(tmp_path / "worker", sys.executable, SEARCHED)
    search = [
        "hydra/sweeper=optuna",
        "hydra.sweeper.sampler=grid",
        "hydra.sweeper.workers=2",
        "hydra.sweeper.pruner=asha",
    ]
    rates = "optimizer.learning_rate=0.3,0.5,1,2"
    asked = [*LAUNCHER, *search, f"hydra.launcher.python={worker}", "run.name=search", rates]
    done = finished(*asked, cwd=tmp_path, **scheduler).stdout
    statuses = [facts(path)["status"] for path in sorted((tmp_path / "outputs" / "search").glob("[0-9]_*"))]
    pruned = statuses.count("preempted")
    assert pruned >= 1 and statuses.count("finished") == 4 - pruned, done
    assert f"{4 - pruned} finished, {pruned} pruned" in done and "optimizer.learning_rate=0.3" in done


def test_what_the_cluster_refuses_is_said_in_a_line(scheduler: dict[str, str], tmp_path: Path) -> None:
    asked = [*LAUNCHER, "debug=one_step", "run.name=refused", "run.seed=1,2"]
    refused = run(*asked, "hydra.launcher.partition=nowhere", cwd=tmp_path, **scheduler)
    assert refused.returncode == 2 and "nowhere" in refused.stderr and "Traceback" not in refused.stderr
    assert not list(tmp_path.glob("outputs/*/*/.job.json")), "nothing claims to be submitted"
