"""Launchers without a cluster: the SLURM script run by bash, invalid settings, and a worker without Hydra."""

import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import yaml

from maxhydra.cli import main
from maxhydra.config.compose.composer import Composer
from maxhydra.config.errors import ConfigError
from maxhydra.launch.base import SweepContext, Trial
from maxhydra.launch.compose import compose_job
from maxhydra.launch.gke.code import NOT_IN_IMAGE, SOURCE
from maxhydra.launch.job_spec import JobSpec, read_job_spec
from maxhydra.launch.local import LocalSettings
from maxhydra.launch.registry import launcher_from_json
from maxhydra.launch.skypilot import SkypilotSettings
from maxhydra.launch.slurm.settings import SlurmSettings, render
from tests.support.cli import ROOT, SMALL, environment, facts, run_ok
from tests.support.polling import wait_for


def compose(sweep: SweepContext, trial: Trial) -> JobSpec:
    return compose_job(Composer(sweep.config_dir), sweep, trial)


def srun_arguments(settings: SlurmSettings, folder: Path, *, code: int = 0, state: str = "RUNNING") -> list[str]:
    """Run the batch script in bash with fake SLURM commands that record their arguments."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".job.json").write_text('{"name": "sweep-1"}')
    for name, body in {"srun": f"exit {code}", "squeue": f"echo {state}", "scontrol": "", "apptainer": ""}.items():
        script = folder / name
        script.write_text(f'#!/bin/bash\nprintf "%s\\n" "$@" > "{folder}/{name}.arguments"\n{body}\n')
        script.chmod(0o755)
    text = render(settings, name="sweep-1", sweep=folder.parent, folders=[folder])
    variables = {"PATH": f"{folder}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash"], input=text, env=variables, text=True, capture_output=True)
    assert done.returncode == code and not done.stderr, done.stderr
    return (folder / "srun.arguments").read_text().splitlines()


def test_the_script_starts_the_worker(tmp_path: Path) -> None:
    folder = tmp_path / "a sweep's" / "0_x=1"
    worker = ["-m", "maxhydra", "job", f"{folder}/job.yaml", "--run-dir", str(folder)]
    plain = srun_arguments(SlurmSettings(setup=("export A='b c'", "test \"$A\" = 'b c'")), folder)
    assert plain == ["--kill-on-bad-exit=1", "--cpus-per-task=1", sys.executable, *worker]
    mounts = ("/data:/data:ro",)
    pyxis = SlurmSettings(container="nvcr.io#jax:26", container_mounts=mounts, srun=("--mpi=none",), cpus_per_task=8)
    image = ["--container-image=nvcr.io#jax:26", f"--container-mounts={folder.parent}:{folder.parent},/data:/data:ro"]
    assert srun_arguments(pyxis, folder) == [
        "--kill-on-bad-exit=1", "--cpus-per-task=8", "--mpi=none", *image, "python", *worker
    ]  # fmt: skip
    apptainer = SlurmSettings(container="jax.sif", container_runtime="apptainer", gpus_per_node=4, python="python3.12")
    bound = ["apptainer", "exec", "--nv", "--bind", f"{folder.parent}:{folder.parent}", "jax.sif", "python3.12"]
    assert srun_arguments(apptainer, folder)[2:] == [*bound, *worker]


@pytest.mark.parametrize(
    "code, state, requeued",
    [
        (138, "RUNNING", True),
        (143, "RUNNING", True),
        (75, "RUNNING", True),
        (143, "COMPLETING", False),
        (1, "RUNNING", False),
    ],
)
def test_the_script_requeues_interrupted_jobs(tmp_path: Path, code: int, state: str, requeued: bool) -> None:
    srun_arguments(SlurmSettings(), tmp_path / "s" / "0", code=code, state=state)
    assert (tmp_path / "s" / "0" / "scontrol.arguments").exists() == requeued


def test_a_job_submitted_twice_runs_once(tmp_path: Path) -> None:
    """The folder holds another claim, so its writer has submitted the job again."""
    folder = tmp_path / "s" / "0"
    folder.mkdir(parents=True)
    (folder / ".job.json").write_text('{"name": "sweep-2"}')
    text = render(SlurmSettings(), name="sweep-1", sweep=tmp_path / "s", folders=[folder])
    done = subprocess.run(["bash"], input=text, env={"PATH": "/usr/bin:/bin"}, text=True, capture_output=True)
    assert done.returncode == 0 and not (folder / "console.txt").exists()


def test_sbatch_parameters() -> None:
    settings = SlurmSettings(
        partition="gpu", account="lab", qos="high", constraint="a100|h100", nodes=4, tasks_per_node=8, gpus_per_node=8,
        cpus_per_task=12, mem="512G", time="2-00:00:00", array_parallelism=2, sbatch=("--exclusive", "--gres=nvme:1"),
    )  # fmt: skip
    assert list(settings.problems()) == []
    text = render(settings, name="lr-1", sweep=Path("/o/lr"), folders=[Path("/o/lr/0"), Path("/o/lr/1")])
    parameters = {line.removeprefix("#SBATCH ") for line in text.splitlines() if line.startswith("#SBATCH")}
    assert parameters >= {
        "--partition=gpu", "--account=lab", "--qos=high", "--constraint=a100|h100", "--nodes=4", "--ntasks-per-node=8",
        "--gpus-per-node=8", "--cpus-per-task=12", "--mem=512G", "--time=2-00:00:00", "--array=0-1%2", "--exclusive",
        "--gres=nvme:1", "--requeue", "--signal=USR1@120",
    }  # fmt: skip
    elastic = dataclasses.replace(settings, min_nodes=2)
    assert "#SBATCH --nodes=2-4\n" in render(elastic, name="lr-1", sweep=Path("/o/lr"), folders=[Path("/o/lr/0")])
    assert elastic.overrides == ("train.elastic=true",) and settings.overrides == ()
    assert launcher_from_json(json.loads(json.dumps(settings.to_json()))) == settings


# A process of a job: exits with the code listed for the number of processes and its index, and logs the attempt.
PROCESS = """
import json, os, pathlib, signal, sys, time
count, index = int(os.environ["JAX_NUM_PROCESSES"]), int(os.environ["JAX_PROCESS_ID"])
log = pathlib.Path(sys.argv[1]) / f"{count}-{index}"
attempt = len(log.read_text()) if log.exists() else 0
log.write_text("x" * (attempt + 1))
code = json.loads(sys.argv[2])[str(count)][attempt][index]
if code == "wait":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    log.with_suffix(".ready").touch()
    time.sleep(60)
os.kill(os.getpid(), 9) if code == "kill" else sys.exit(code)
"""


@pytest.mark.slow
@pytest.mark.default_cases("None-plan0-0", "None-plan1-75", "None-plan3-2", "1-plan5-0")
@pytest.mark.parametrize(
    ("least", "plan", "code"),
    [
        # A process is killed, and the other notices; the second attempt finishes.
        (None, {2: [[75, "kill"], [0, 0]]}, 0),
        (None, {2: [[75, "kill"]] * 3}, 75),
        (None, {2: [[1, 1]]}, 1),
        (None, {2: [[2, 75]]}, 2),
        (None, {2: [[143, 143]]}, 143),
        # On fewer processes: three do not divide the batch, two do.
        (1, {4: [[75, 75, 75, "kill"]], 3: [[2, 2, 2]], 2: [[75, "kill"]], 1: [[0]]}, 0),
        (3, {4: [[75, 75, 75, "kill"]], 3: [[2, 2, 2]]}, 2),
    ],
)
def test_a_local_job_restarts_after_the_loss_of_a_process(
    least: int | None, plan: dict[int, list], code: int, tmp_path: Path
) -> None:
    settings = LocalSettings(processes=max(plan), max_restarts=2, min_processes=least)
    command = [sys.executable, "-c", PROCESS, str(tmp_path), json.dumps(plan)]
    module = [sys.executable, "-m", "maxhydra.launch.local", json.dumps(settings.to_json())]
    done = subprocess.run([*module, *command], capture_output=True, text=True, timeout=240)
    assert done.returncode == code, done.stderr
    attempts = {count: len((tmp_path / f"{count}-0").read_text()) for count in plan}
    assert attempts == {count: len(codes) for count, codes in plan.items()}


@pytest.mark.slow
def test_a_local_job_forwards_signals_and_kills_processes_that_do_not_end(tmp_path: Path) -> None:
    settings = json.dumps(LocalSettings(processes=2).to_json())
    command = [sys.executable, "-m", "maxhydra.launch.local", settings, sys.executable, "-c", PROCESS, str(tmp_path)]
    job = subprocess.Popen([*command, json.dumps({2: [["wait", "wait"]]})])
    wait_for(lambda: all((tmp_path / f"2-{index}.ready").exists() for index in range(2)))
    job.terminate()
    assert job.wait(240) == 143
    (other := tmp_path / "other").mkdir()
    impatient = (
        "import sys; from maxhydra.launch import local; local.NOTICE_SECONDS = 0.5; sys.exit(local.main(sys.argv[1:]))"
    )
    process = [sys.executable, "-c", PROCESS, str(other), json.dumps({2: [["wait", "kill"], [0, 0]]})]
    assert subprocess.run([sys.executable, "-c", impatient, settings, *process], timeout=240).returncode == 0


@pytest.mark.parametrize("settings", [{"processes": 0}, {"processes": 2, "min_processes": 3}, {"min_processes": 0}])
def test_invalid_local_settings(settings: dict[str, int]) -> None:
    assert [problem.path for problem in LocalSettings(**settings).problems()] == [f"hydra.launcher.{[*settings][-1]}"]


@pytest.mark.parametrize(
    "text, seconds", [("30", 1800), ("1:30", 90), ("4:00:00", 14400), ("2-12", 216000), ("1-00:00:10", 86410)]
)
def test_slurm_time_formats(text: str, seconds: int) -> None:
    assert SlurmSettings(time=text).seconds == seconds


def test_all_invalid_settings_are_reported_at_once() -> None:
    wrong = SlurmSettings(
        partition="a b", nodes=0, tasks_per_node="2", mem="lots", time="1:00", max_requeues=-1,  # type: ignore[arg-type]
        container_runtime="dockr", container_mounts=("/data",), setup=("a\nb",), sbatch=("--array=3", "gres"),
    )  # fmt: skip
    paths = [problem.path.rpartition(".")[2] for problem in wrong.problems()]
    assert paths == [
        "nodes", "tasks_per_node", "max_requeues", "container_runtime", "partition", "mem", "time", "container_mounts",
        "container_mounts", "setup", "sbatch", "sbatch",
    ]  # fmt: skip


@pytest.mark.exhaustive
def test_a_worker_needs_no_hydra_and_resumes_its_run(tmp_path: Path) -> None:
    sweep = SweepContext(
        tmp_path / "sweep", (*SMALL, "checkpoint.every=2", "optimizer/schedule=constant"), str(tmp_path)
    )
    folder = sweep.path(Trial(0, "0_a", ()))
    arguments = ["job", f"{folder}/job.yaml", "--run-dir", str(folder)]
    compose(sweep, Trial(0, "0_a", ("train.steps=3",))).write(folder)
    run_ok(*arguments, cwd=tmp_path)
    compose(sweep, Trial(0, "0_a", ("train.steps=5",))).write(folder)
    # The fork server has imported Hydra.
    script = "import sys; from maxhydra.cli.main import run; code = run(sys.argv[1:]); "
    script += "sys.exit(code or ('hydra' in sys.modules and 99))"
    command = [sys.executable, "-c", script, *arguments]
    done = subprocess.run(command, env=environment(), cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    run = facts(folder)
    assert [(session["start_step"], session["end_step"]) for session in run["sessions"]] == [(0, 3), (3, 5)]
    assert run["choices"]["model"] == "tiny" and "train.steps=5" in run["overrides"]
    assert run["config_dir"] == str(tmp_path)


@pytest.mark.parametrize("folder", ["/home/o'hara/lr", r"/a\b/c\'d", "/x/trailing\\", "/a b/c=1,2[3]"])
def test_a_job_finds_its_folder_whatever_characters_the_path_has(folder: str) -> None:
    spec = compose(SweepContext(Path(folder), (), None), Trial(0, "0_seed=1", ("run.seed=1",)))
    assert (spec.config.run.outputs, spec.config.run.name) == (folder, "0_seed=1")


@pytest.mark.slow
def test_an_invalid_job_file_lists_every_problem(tmp_path: Path) -> None:
    compose(SweepContext(tmp_path, (), None), Trial(0, "0", ())).write(tmp_path)
    text = (tmp_path / "job.yaml").read_text()
    (tmp_path / "job.yaml").write_text(
        text.replace("log_every: 10", "log_every: 0").replace("\n  seed: 0", "\n  sed: 0")
    )
    with pytest.raises(ConfigError) as caught:
        read_job_spec(tmp_path / "job.yaml")
    assert {problem.path for problem in caught.value.problems} == {"run.sed", "train.log_every"}
    (tmp_path / "job.yaml").write_text(text)
    (tmp_path / "job.json").write_text('{"choices": ')
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job_spec(tmp_path / "job.yaml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_job_spec(tmp_path / "nothing.yaml")


@pytest.mark.slow
def test_the_run_json_of_a_job_is_checked(tmp_path: Path) -> None:
    compose(SweepContext(tmp_path, (), None), Trial(0, "0", ())).write(tmp_path)
    (tmp_path / "job.yaml").rename(tmp_path / "config.yaml")
    (tmp_path / "job.json").unlink()
    assert read_job_spec(tmp_path / "config.yaml").overrides == []
    for content, message in (
        ("{", r"run\.json: is not JSON"),
        ("[]", r"run\.json: is not a JSON object"),
        ('{"format": 99, "maxhydra": "7.0"}', r"run\.json: has format 99.*install maxhydra 7\.0"),
    ):
        (tmp_path / "run.json").write_text(content)
        with pytest.raises(ConfigError, match=message):
            read_job_spec(tmp_path / "config.yaml")


@pytest.mark.slow
def test_plugins_do_not_import_the_clients_of_clusters() -> None:
    """Hydra imports all plugins for every composed config; the Kubernetes client alone takes a second."""
    check = """
import sys
import hydra_plugins.maxhydra_launcher, hydra_plugins.maxhydra_optuna
assert not {"kubernetes", "optuna", "jax", "numpy"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", check], check=True, env=environment())


@pytest.mark.slow
def test_skypilot_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    """The documented fields of a task; the script passes the nodes to JAX and writes the config of the job."""
    options = {"accelerators": "H100:8", "nodes": 2, "outputs": "gs://bucket/runs", "use_spot": "true", "infra": "gcp"}
    launcher = ["hydra/launcher=skypilot", *(f"hydra.launcher.{key}={value}" for key, value in options.items())]
    launcher += ["hydra.launcher.secrets=[HF_TOKEN]", "+hydra.launcher.env.A=b"]
    assert main.run(["launch", "render", *launcher, "run.seed=1,2", "run.name=lr"]) == 0
    first, second = yaml.safe_load_all(capsys.readouterr().out)
    assert {"name", "resources", "num_nodes", "envs", "secrets", "file_mounts", "setup", "run"} == first.keys()
    assert first["resources"] == {"infra": "gcp", "accelerators": "H100:8", "use_spot": True}
    assert first["file_mounts"] == {"/outputs": {"source": "gs://bucket", "mode": "MOUNT"}}
    assert first["secrets"] == {"HF_TOKEN": None} and all(isinstance(value, str) for value in first["envs"].values())
    assert "seed: 2" in second["envs"]["MAXHYDRA_JOB"] and "/outputs/runs/lr/1_seed=2" in second["run"]
    fake = "maxhydra() { echo $JAX_COORDINATOR_ADDRESS $JAX_NUM_PROCESSES $JAX_PROCESS_ID; head -n1 job.yaml; }; "
    script = fake + second["run"].replace("python -m maxhydra", "maxhydra")
    with tempfile.TemporaryDirectory() as home:
        nodes = {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
        variables = {"PATH": os.environ["PATH"], "HOME": home, **nodes, **second["envs"]}
        done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["10.0.0.1:12321 2 1", "task:"], done.stderr
    assert main.run(["-m", "hydra/launcher=skypilot", "run.name=lr"]) == 2
    assert "does not start jobs" in capsys.readouterr().err
    wrong = SkypilotSettings(nodes=0, accelerators="H100 8", outputs="ftp://x", env={"WANDB_API_KEY": "k"})
    assert [problem.path.rpartition("launcher.")[2] for problem in wrong.problems()] == [
        "nodes", "accelerators", "outputs", "env.WANDB_API_KEY"
    ]  # fmt: skip


@pytest.mark.slow
def test_the_image_is_built_from_the_checkout(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """The printed command, and the same run with a fake docker; the Dockerfile takes the arguments that it passes."""
    command = [sys.executable, "-m", "maxhydra", "launch", "image", "registry/maxhydra:1", "--extra", "tpu", "--push"]
    docker = tmp_path / "docker"
    docker.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    docker.chmod(0o755)
    variables = {**environment(), "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([*command, "--run"], env=variables, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    build, push = (tmp_path / "calls").read_text().splitlines()
    assert done.stdout.splitlines() == [f"docker {build}", f"docker {push}"]
    arguments = re.findall(r"--build-arg (\w+)=(\w+)", build)
    assert [name for name, _ in arguments] == ["EXTRA", "REVISION"] and re.fullmatch("[0-9a-f]{40}", arguments[1][1])
    dockerfile = (ROOT / "Dockerfile").read_text()
    assert {name for name, _ in arguments} == set(re.findall(r"^ARG (\w+)", dockerfile, re.MULTILINE))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    tracked = [name for name in ignored if subprocess.check_output(["git", "ls-files", name], cwd=ROOT)]
    assert tuple(tracked) == NOT_IN_IMAGE
    assert SOURCE in dockerfile and push == "push registry/maxhydra:1"
