"""Sweeps: search spaces, parallel jobs, and resuming after a kill. Jobs are real processes that write runs as training
does, in a fraction of a second."""

import contextlib
import dataclasses
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from maxhydra.cli.main import run as maxhydra
from maxhydra.cli.multirun import extend_plan
from maxhydra.config.compose.composer import find_composer
from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import Trial
from maxhydra.launch.gpus import visible_gpus
from maxhydra.launch.local import LocalJobs, LocalSettings
from maxhydra.record import RunDirectory
from maxhydra.sweep.controller import Controller, ListedTrials, TrialSource, TrialStatus
from maxhydra.sweep.extension import nearby_values
from maxhydra.sweep.plan import SWEEP_FORMAT, Settings, SweepPlan, read_plan, write_plan
from maxhydra.sweep.run import cancel, resume_sweep, start_sweep, status
from maxhydra.sweep.search import SearchTrials, distributions, grid_values
from maxhydra.sweep.table import LiveTable
from tests.support import cli
from tests.support.polling import wait_for
from tests.support.programs import Released
from tests.support.run_folders import write_run
from tests.support.skips import import_optional

optuna = import_optional("optuna", extra="sweep")


JOB = textwrap.dedent(
    """
    import json, os, signal, sys, time
    from pathlib import Path
    from maxhydra.record import MetricsWriter, RunDirectory

    values = dict(line.split("=", 1) for line in sys.argv[1:])
    path = Path(values["run.outputs"].strip("'")) / values["run.name"].strip("'")
    rate, steps = float(values["rate"]), int(values.get("steps", 9))
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(1))
    run = RunDirectory(path)
    with run.session("", {}):
        (path.parent / f"started-{path.name}").open("a").write("x")
        if "CUDA_VISIBLE_DEVICES" in os.environ:
            (path / "gpus").write_text(f"{os.environ['CUDA_VISIBLE_DEVICES']} {time.time()}")
        metrics = MetricsWriter(run.metrics_path)
        for step in range(1, steps + 1):
            time.sleep(float(values.get("pause", 0.02)))
            if rate > 5:
                raise RuntimeError("diverged")
            metrics.write(step, {"eval/loss": (rate - 0.3) ** 2 + 1 / step if rate >= 0 else float("nan")})
            # A held job runs until a file exists: that it still runs does not depend on the speed of the machine.
            while "held" in values and not (path.parent / "go").exists() and not received:
                time.sleep(0.02)
            if received:
                break
        objective = {"name": "eval/loss", "value": (rate - 0.3) ** 2}
        reason = ("preempted", "SIGTERM") if received else ("finished", "done")
        run.finish(*reason, objective=objective)
        (path / "ended").write_text(str(time.time()))
    """
)


class ScriptJobs(LocalJobs):
    """Local jobs that run the small script above."""

    def command(self, trial: Trial) -> list[str]:
        _, _, _, *rest = super().command(trial)
        return [sys.executable, "-c", JOB, *rest]


def make_plan(folder: Path, space: dict[str, str], *, fixed: tuple[str, ...] = (), **settings: object) -> SweepPlan:
    sweep_settings = Settings(**{"workers": 2, **settings})  # type: ignore[arg-type]
    objectives = sweep_settings.objectives or ("eval/loss",)
    return SweepPlan(folder, fixed, space, (), (), objectives, sweep_settings, None)


def run(plan: SweepPlan) -> tuple[list[str], SearchTrials]:
    write_plan(plan)
    output: list[str] = []
    trials = SearchTrials(plan)
    reason = Controller(plan, trials, ScriptJobs(LocalSettings(), plan.context), output.append).run()
    return [*output, reason], trials


def make_grid(folder: Path, jobs: Sequence[str], launcher: LocalSettings, **settings: object) -> SweepPlan:
    """A grid sweep; `jobs` are the overrides of each job, separated by spaces."""
    return dataclasses.replace(
        make_plan(folder, {}, **settings),
        listed=tuple(tuple(job.split()) for job in jobs),
        folders=tuple(f"{number}_job" for number in range(len(jobs))),
        objectives=(),
        launcher=launcher,
    )


def run_controller(folder: Path, say: Callable[[str], None] = print) -> TrialSource:
    """Run the controller of a stored plan; also the entry point of a controller process."""
    plan = read_plan(folder)
    assert isinstance(plan.launcher, LocalSettings)
    trials = SearchTrials(plan) if plan.space else ListedTrials(plan)
    table = LiveTable(say) if sys.stdout.isatty() else None
    Controller(plan, trials, ScriptJobs(plan.launcher, plan.context), say, table=table).run()
    say("\n".join(trials.highlights()))
    return trials


def controller_command(plan: SweepPlan) -> list[str]:
    script = "import sys; from pathlib import Path; from tests.sweep.test_sweep import run_controller\n"
    return [sys.executable, "-c", f"{script}run_controller(Path(sys.argv[1]))", str(plan.folder)]


def start_controller(plan: SweepPlan, **variables: str) -> subprocess.Popen:
    """Run a controller in a separate process."""
    root, env = str(Path(__file__).parents[2]), {**os.environ, **variables}
    return subprocess.Popen(controller_command(plan), cwd=root, env=env, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(
    "text, expected",
    [
        ("a,b", optuna.distributions.CategoricalDistribution(["a", "b"])),
        ("choice(1,2,4)", optuna.distributions.CategoricalDistribution(["1", "2", "4"])),
        ("range(1,8,2)", optuna.distributions.IntDistribution(1, 7, step=2)),
        ("range(0.0,1.0,0.25)", optuna.distributions.FloatDistribution(0.0, 0.75, step=0.25)),
        ("interval(0,1)", optuna.distributions.FloatDistribution(0.0, 1.0)),
        ("int(interval(1,8))", optuna.distributions.IntDistribution(1, 8)),
        ("tag(log,interval(1e-5,1e-2))", optuna.distributions.FloatDistribution(1e-5, 1e-2, log=True)),
    ],
)
def test_sweep_syntax_becomes_distributions(text: str, expected: object) -> None:
    assert distributions({"key": text}, grid=False) == {"key": expected}


def test_all_invalid_ranges_are_reported_at_once() -> None:
    space = {"a": "range(5,5)", "b": "interval(2,1)", "c": "tag(log,interval(0,1))", "d": "7"}
    with pytest.raises(ConfigError) as caught:
        distributions(space, grid=False)
    assert [problem.path for problem in caught.value.problems] == ["a", "b", "c", "d"]


@pytest.mark.slow
def test_a_grid_has_every_combination_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is continuous, but a grid needs discrete values"):
        distributions({"rate": "interval(0,1)"}, grid=True)
    assert grid_values(distributions({"x": "range(1,8,2)"}, grid=True)["x"]) == [1, 3, 5, 7]
    _, trials = run(make_plan(tmp_path / "s", {"rate": "0.1,0.3", "steps": "range(1,3)"}, sampler="grid"))
    params = sorted(tuple(sorted(trial.params.items())) for trial in trials._study.trials)
    assert params == sorted((("rate", rate), ("steps", steps)) for rate in ("0.1", "0.3") for steps in (1, 2))
    assert trials.counts()[TrialStatus.finished] == 4
    text = "\n".join(trials.highlights())
    assert "best: job" in text and "rate=0.3" in text


@pytest.mark.exhaustive
def test_bad_jobs_are_pruned(tmp_path: Path) -> None:
    """tests/cluster/test_slurm.py also prunes."""
    settings = {"sampler": "random", "pruner": "asha", "min_steps": 1, "trials": 8, "seed": 3}
    _, trials = run(make_plan(tmp_path / "s", {"rate": "interval(0,4)"}, fixed=("steps=30", "pause=0.1"), **settings))
    counts = trials.counts()
    assert counts[TrialStatus.pruned] >= 2 and counts[TrialStatus.finished] >= 1 and sum(counts.values()) == 8
    pruned = [trial for trial in trials._study.trials if trial.state is optuna.trial.TrialState.PRUNED]
    assert all(max(trial.intermediate_values) < 30 for trial in pruned)
    runs = [RunDirectory(path.parent, writes=False) for path in (tmp_path / "s").glob("*/run.json")]
    facts = [run.read() for run in runs if run.read()["status"] == "pruned"]
    assert len(facts) == counts[TrialStatus.pruned]
    assert all(re.match(r"pruned by asha at step \d+, eval/loss ", fact["reason"]) for fact in facts)
    assert all(fact["sessions"][-1]["status"] == "pruned" for fact in facts)
    assert sum("INFO pruned by asha" in run.log_path.read_text() for run in runs if run.log_path.exists()) == len(facts)


@pytest.mark.slow
def test_failures_are_counted(tmp_path: Path) -> None:
    output, trials = run(make_plan(tmp_path / "f", {"rate": "range(6,20)"}, sampler="grid", max_failures=2, workers=1))
    assert trials.counts() == {TrialStatus.finished: 0, TrialStatus.failed: 3, TrialStatus.pruned: 0}
    assert any("diverged" in line for line in output)
    plan = make_plan(tmp_path / "f", {"rate": "range(6,20)"}, sampler="grid", max_failures=4, workers=1)
    output, trials = run(plan)
    assert trials.counts()[TrialStatus.failed] == 5
    resume = f"maxhydra sweep resume {plan.folder} --max-failures 10"
    assert output[-1] == f"5 jobs failed, over max_failures=4; resume with: {resume}"


@pytest.mark.exhaustive
def test_every_job_of_a_grid_sweep_runs(tmp_path: Path) -> None:
    """Failures do not stop a grid sweep: after a resume, the same jobs would fail first again."""
    rates = ["9"] * 5 + ["0.5"]
    plan = make_grid(tmp_path / "s", [f"rate={rate}" for rate in rates], LocalSettings())
    write_plan(plan)
    trials = run_controller(plan.folder)
    assert trials.counts() == {TrialStatus.finished: 1, TrialStatus.failed: 5, TrialStatus.pruned: 0}


@pytest.mark.slow
def test_a_job_with_a_nan_objective_has_failed_and_others_continue(tmp_path: Path) -> None:
    lines, trials = run(make_plan(tmp_path, {"rate": "choice(-1,0.5)"}, sampler="grid"))
    assert trials.counts() == {TrialStatus.finished: 1, TrialStatus.failed: 1, TrialStatus.pruned: 0}
    assert any("failed, eval/loss is nan" in line for line in lines)


@pytest.mark.slow
def test_status_shows_objectives_that_are_not_finite(tmp_path: Path) -> None:
    plan = dataclasses.replace(make_plan(tmp_path / "s", {}), listed=((), (), ()), folders=("0", "1", "2"))
    write_plan(plan)
    for folder, value in zip(plan.folders, (2.5, math.nan, -math.inf), strict=True):
        job = RunDirectory(plan.folder / folder)
        job.start("", {})
        job.finish("finished", objective={"name": "eval/loss", "value": value})
    expected = ["0: finished  eval/loss 2.5", "1: finished  eval/loss nan", "2: finished  eval/loss -inf", "3 finished"]
    more = f"more: maxhydra sweep extend {plan.folder} run.seed=1,2"
    assert list(status(plan)) == [*expected, "best: job 2, eval/loss -inf", "      maxhydra", more]


@pytest.mark.slow
def test_several_objectives(tmp_path: Path) -> None:
    settings = {
        "sampler": "nsga2",
        "trials": 4,
        "objectives": ("eval/loss", "step"),
        "directions": ("minimize", "maximize"),
    }
    _, trials = run(make_plan(tmp_path / "s", {"rate": "interval(0,1)", "steps": "range(2,5)"}, **settings))
    assert trials.counts()[TrialStatus.finished] == 4
    assert len(trials._study.directions) == 2


@pytest.mark.slow
def test_a_killed_controller_neither_duplicates_nor_loses_jobs(tmp_path: Path) -> None:
    """The next controller finds running jobs, restarts one that was killed too, and runs the rest."""
    plan = make_plan(tmp_path / "s", {"rate": "interval(0,1)"}, fixed=("held=1",), sampler="random", trials=6)
    write_plan(plan)
    controller = start_controller(plan)
    wait_for(lambda: len(list(plan.folder.glob("*/metrics.jsonl"))) == 2)
    controller.kill()
    controller.wait()
    first = min(plan.folder.glob("*/run.json"))
    victim = RunDirectory(first.parent, writes=False).read()["sessions"][-1]["pid"]
    os.kill(victim, signal.SIGKILL)
    wait_for(lambda: RunDirectory(first.parent, writes=False).read()["status"] == "lost")
    trials = SearchTrials(plan)
    output = Released(plan.folder, count=1)
    Controller(plan, trials, ScriptJobs(LocalSettings(), plan.context), output.append).run()
    assert any("found running" in line for line in output)
    assert [trial.number for trial in trials._study.trials] == list(range(6))
    assert trials.counts()[TrialStatus.finished] == 6
    starts = sorted(len(path.read_text()) for path in plan.folder.glob("started-*"))
    assert starts == [1, 1, 1, 1, 1, 2]
    rates = [trial.params["rate"] for trial in trials._study.trials]
    assert len(set(rates)) == 6, "a restarted sampler must not repeat its samples"


@pytest.mark.exhaustive
def test_a_cancelled_sweep_can_be_resumed(tmp_path: Path) -> None:
    """Cancelled from a process other than the controller, which then neither starts nor restarts jobs."""
    settings = {"sampler": "random", "trials": 3}
    plan = make_plan(tmp_path / "s", {"rate": "interval(0,1)"}, fixed=("held=1",), **settings)
    write_plan(plan)
    with start_controller(plan) as controller:
        wait_for(lambda: len(list(plan.folder.glob("*/metrics.jsonl"))) == 2)
        output: list[str] = []
        cancel(plan, output.append)
        assert output[0].startswith("2 jobs were asked to stop")
        assert controller.wait(240) == 0
    runs = [RunDirectory(path.parent, writes=False) for path in plan.folder.glob("*/run.json")]
    wait_for(lambda: [run.read()["status"] for run in runs] == ["preempted"] * 2)
    (plan.folder / ".cancelled").unlink()
    (plan.folder / "go").touch()
    _, trials = run(plan)
    assert trials.counts()[TrialStatus.finished] == 3
    assert sorted(len(path.read_text()) for path in plan.folder.glob("started-*")) == [1, 2, 2]


def test_plans_round_trip_and_settings_are_validated(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"rate": "0.1,0.3"}, fixed=("steps=3",))
    write_plan(plan)
    assert read_plan(plan.folder) == plan
    path = plan.folder / "sweep.json"
    stored = json.loads(path.read_text())
    assert stored.pop("format") == SWEEP_FORMAT and stored.pop("maxhydra")
    path.write_text(json.dumps(stored))
    assert read_plan(plan.folder) == plan
    path.write_text(json.dumps({**stored, "format": 9, "maxhydra": "3.0.0"}))
    with pytest.raises(ConfigError, match=r"has format 9, written by maxhydra 3\.0\.0.*install maxhydra 3\.0\.0"):
        read_plan(plan.folder)
    write_plan(plan)
    with pytest.raises(ConfigError, match="is an existing sweep with different settings"):
        start_sweep(dataclasses.replace(plan, space={"rate": "1,2"}), print)
    with pytest.raises(ConfigError, match="is not a sweep"):
        read_plan(tmp_path / "x")
    wrong = Settings(sampler="tpr", pruner="asha", workers=0, objectives=("a", "b"), directions=("up",))
    assert {problem.path.rpartition(".")[2] for problem in wrong.problems()} == {
        "sampler", "workers", "directions", "pruner"
    }  # fmt: skip
    odd = Settings(trials=True, seed=-1, objectives=("loss", "loss"), sampler="nsga2")
    assert [problem.path.rpartition(".")[2] for problem in odd.problems()] == ["trials", "seed", "objectives"]
    assert list(Settings(seed="x").problems()) and not list(Settings(seed=None).problems())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "flags, message",
    [(["--workers", "0"], "1 or more"), (["--trials", "9"], "these jobs are fixed")],
)
def test_resume_rejects_settings_it_cannot_change(
    flags: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a worker it would wait forever."""
    write_plan(make_plan(tmp_path / "s", {"rate": "0.1,0.3"}, sampler="grid"))
    assert maxhydra(["sweep", "resume", str(tmp_path / "s"), *flags]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "s" / "study.journal").exists()


def test_two_controllers_cannot_run_the_same_sweep(tmp_path: Path) -> None:
    plan = make_plan(tmp_path / "s", {"rate": "0.1"})
    write_plan(plan)
    holder = "import fcntl, os, sys; h = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT); fcntl.lockf(h, fcntl.LOCK_EX); "
    holder += "print('held', flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", holder, str(plan.folder / ".sweep.lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdin is not None
        other.stdout.readline()
        with pytest.raises(ConfigError, match="another process"):
            resume_sweep(plan, print)
        other.stdin.close()


@pytest.mark.exhaustive
def test_jobs_have_their_own_gpus_after_a_killed_controller_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight jobs on four GPUs. The next controller finds the running jobs and their GPUs, and runs each job once."""
    gpus = {"CUDA_VISIBLE_DEVICES": "0,1,GPU-2a,GPU-3b"}
    jobs = [f"rate=0.{number} held=1" for number in range(1, 9)]
    plan = make_grid(tmp_path / "s", jobs, LocalSettings(gpus_per_job=1), workers=8)
    write_plan(plan)
    controller = start_controller(plan, **gpus)
    wait_for(lambda: len(list(plan.folder.glob("*/gpus"))) == 4)
    time.sleep(0.5)
    assert len(list(plan.folder.glob("[0-9]_job/.job.json"))) == 4, "the other jobs wait for free GPUs"
    controller.kill()
    controller.wait()
    for name, value in gpus.items():
        monkeypatch.setenv(name, value)
    output = Released(plan.folder, count=4)
    trials = run_controller(plan.folder, output.append)
    assert sum("found running" in line for line in output) == 4
    assert trials.counts()[TrialStatus.finished] == 8
    assert [len(path.read_text()) for path in plan.folder.glob("started-*")] == [1] * 8
    intervals: dict[str, list[tuple[float, float]]] = {}
    for folder in plan.folder.glob("[0-9]_job"):
        name, start = (folder / "gpus").read_text().split()
        intervals.setdefault(name, []).append((float(start), float((folder / "ended").read_text())))
    assert intervals.keys() == {"0", "1", "GPU-2a", "GPU-3b"}
    for times in intervals.values():
        times.sort()
        assert all(first[1] <= second[0] for first, second in itertools.pairwise(times)), "two jobs shared a GPU"


@pytest.mark.parametrize(
    ("settings", "visible", "max_jobs", "memory"),
    [
        ({"gpus_per_job": 1}, "0,1,2,3", 4, None),
        ({"gpus_per_job": 2}, "0,1,2", 1, None),
        ({"gpus_per_job": 1, "jobs_per_gpu": 3}, "5,7", 6, "0.300"),
        ({"gpus_per_job": 1, "parallel_jobs": 2}, "0,1,2,3", 2, None),
        ({"parallel_jobs": 3}, "", 3, None),
        ({}, "0,1", None, None),
    ],
)
def test_the_gpus_limit_the_number_of_jobs(
    settings: dict[str, int], visible: str, max_jobs: int | None, memory: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    jobs = LocalJobs(LocalSettings(**settings), make_plan(Path("s"), {}).context)
    assert not list(LocalSettings(**settings).problems()) and jobs.max_jobs == max_jobs
    assert jobs._assign_gpus()[1].get("XLA_PYTHON_CLIENT_MEM_FRACTION") == memory


def test_a_report_averages_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_grid(tmp_path / "s", ["rate=1"] * 4, LocalSettings())
    write_plan(plan)
    assert maxhydra(["sweep", "report", str(plan.folder)]) == 2
    assert "no job has finished" in capsys.readouterr().err
    for number, folder in enumerate(plan.folders):
        write_run(plan.folder / folder, rate=(1e-3, 1e-2)[number // 2], seed=number % 2, status="finished")
    assert maxhydra(["sweep", "report", str(plan.folder)]) == 0
    head, best, other, *_ = capsys.readouterr().out.splitlines()
    assert head.split() == ["optimizer.learning_rate", "eval/loss", "seeds", "best", "run"]
    assert best.split()[0] == "0.001" and best.split()[2:5] == ["±", "0", "2"]
    assert other.split()[0] == "0.01" and other.split()[-1] in ("2_job", "3_job")


def test_missing_gpus_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(ConfigError, match="more than the 1 GPUs that this machine has"):
        LocalJobs(LocalSettings(gpus_per_job=2), make_plan(Path("s"), {}).context).max_jobs  # noqa: B018
    wrong = LocalSettings(gpus_per_job=3, processes=2, jobs_per_gpu=2)
    assert [problem.path for problem in wrong.problems()] == [
        "hydra.launcher.gpus_per_job",
        "hydra.launcher.jobs_per_gpu",
    ]


def test_nvidia_smi_lists_the_gpus(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-1)'\necho 'GPU 1: NVIDIA H200 (UUID: GPU-2)'\n")
    tool.chmod(0o755)
    assert visible_gpus({"PATH": str(tmp_path)}) == ["0", "1"]
    assert visible_gpus({"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"}) == ["1"]
    assert visible_gpus({"PATH": "/nowhere"}) == visible_gpus({"CUDA_VISIBLE_DEVICES": "-1"}) == []


@pytest.mark.exhaustive
def test_a_terminal_shows_a_live_table(tmp_path: Path) -> None:
    """In a pseudo-terminal: running jobs with step and device, counts, the best so far, and the winner at the end."""
    jobs = [f"rate={rate} steps=30 pause=0.08" for rate in (0.1, 0.3, 0.5)]
    plan = make_grid(tmp_path / "lr", jobs, LocalSettings(gpus_per_job=1), workers=3)
    write_plan(plan)
    leader, follower = os.openpty()
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "3,4", "COLUMNS": "100", "LINES": "30"}
    root = str(Path(__file__).parents[2])
    process = subprocess.Popen(controller_command(plan), cwd=root, env=env, stdout=follower)
    os.close(follower)
    text = read_terminal(leader).decode()
    assert process.wait(240) == 0
    assert "lr: 2 running, 1 waiting" in text and re.search(r"0_job\s+\d+\s.*gpu 3", text)
    assert re.search(r"1_job\s+\d+\s.*gpu 4", text) and "\033[J" in text
    end = text.rpartition("\033[J")[2]
    assert "best: job 1_job, eval/loss 0" in end and "gpu" not in end
    assert f"more: maxhydra sweep extend {plan.folder} rate=0.173,0.387" in end


@pytest.mark.exhaustive
def test_a_sweep_on_a_terminal_shows_the_table(tmp_path: Path) -> None:
    """Without a launcher, jobs are processes, whose output does not mix with the table."""
    leader, follower = os.openpty()
    arguments = [*cli.SMALL, "train.steps=2", "run.seed=1,2", "run.name=s"]
    with open(os.devnull) as null, os.fdopen(follower, "w") as terminal:
        sweep = cli.start("-m", *arguments, cwd=tmp_path, streams=(null, terminal, terminal))
    output = read_terminal(leader).decode()
    assert sweep.wait(240) == 0, output
    assert (
        "s: 1 running, 1 waiting" in output and "best: job " in output and "step " not in output.rpartition("\033[J")[2]
    )
    assert len(list((tmp_path / "outputs" / "s").glob("*/console.txt"))) == 2


def read_terminal(leader: int) -> bytes:
    """All output of a pseudo-terminal, whose end is an error."""
    output = b""
    with contextlib.suppress(OSError):
        while chunk := os.read(leader, 4096):
            output += chunk
    return output


@pytest.mark.parametrize(
    ("values", "best", "expected"),
    [
        (("1e-3", "3e-3", "1e-2"), "1e-2", ["0.0333"]),
        (("1e-3", "3e-3", "1e-2"), "1e-3", ["0.000333"]),
        (("0.1", "0.4", "1.6"), "0.4", ["0.2", "0.8"]),
        (("2", "4"), "4", []),
        (("adamw", "muon"), "muon", []),
        (("0.0", "0.1"), "0.1", []),
    ],
)
def test_values_near_the_best_one(values: tuple[str, ...], best: str, expected: list[str]) -> None:
    assert nearby_values(values, best) == expected


@pytest.mark.slow
def test_a_grid_is_extended(tmp_path: Path) -> None:
    """New values with all values of the other keys, new seeds of all jobs; existing jobs keep their folders."""
    jobs = [("optimizer.learning_rate=1e-3", "run.seed=1"), ("optimizer.learning_rate=3e-3", "run.seed=1")]
    plan = dataclasses.replace(
        make_plan(tmp_path / "s", {}),
        listed=tuple(("model=micro", *job) for job in jobs),
        folders=("0_learning_rate=1e-3", "1_learning_rate=3e-3"),
        objectives=(),
    )
    composer = find_composer()
    longer = extend_plan(composer, plan, ["optimizer.learning_rate=3e-3,1e-2"])
    assert longer.listed[2:] == (("model=micro", "optimizer.learning_rate=0.01", "run.seed=1"),)
    assert longer.folders == (*plan.folders, "2_learning_rate=0.01")
    seeds = extend_plan(composer, plan, ["run.seed=2,3"])
    assert [job[1:] for job in seeds.listed[2:]] == [(rate, f"run.seed={n}") for (rate, _) in jobs for n in (2, 3)]
    assert seeds.folders[2] == "2_learning_rate=1e-3,seed=2" and seeds.settings.workers == 1
    with pytest.raises(ConfigError, match="adds no job"):
        extend_plan(composer, plan, ["run.seed=1"])
    with pytest.raises(ConfigError, match=r"optimizer\.learning_rat"):
        extend_plan(composer, plan, ["optimizer.learning_rat=1"])
    write_plan(make_plan(tmp_path / "search", {"rate": "0.1,0.3"}))
    assert maxhydra(["sweep", "extend", str(tmp_path / "search"), "run.seed=1"]) == 2
    write_plan(plan)
    assert maxhydra(["sweep", "extend", str(tmp_path / "s")]) == 2
    assert maxhydra(["sweep", "status", str(tmp_path / "s"), "run.seed=1"]) == 2


@pytest.mark.exhaustive
def test_a_killed_job_of_a_grid_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    arguments = [*cli.SMALL, "train.steps=60", "checkpoint.every=5", "train.eval_batches=0", "run.name=s"]
    controller = cli.start_silent("-m", "hydra/launcher=local", *arguments, cwd=tmp_path)
    folder = tmp_path / "outputs" / "s" / "0"
    wait_for(lambda: sum(path.name.isdigit() for path in (folder / "checkpoints").glob("*")) > 1)
    os.kill(cli.facts(folder)["sessions"][-1]["pid"], signal.SIGKILL)
    assert controller.wait(240) == 0
    lost, finished = cli.facts(folder)["sessions"]
    assert (lost["status"], finished["status"]) == ("lost", "finished") and finished["start_step"] >= 5
    assert list(cli.losses(folder)) == list(range(1, 61))
