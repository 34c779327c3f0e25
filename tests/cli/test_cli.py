"""The command line as users see it: a separate process, its exit code, output and files."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from maxhydra import __version__
from maxhydra.cli.main import run
from maxhydra.config.errors import quoted
from maxhydra.config.registry import groups
from tests.support import cli
from tests.support.cli import SMALL
from tests.support.run_folders import write_run

ROOT = Path(__file__).parents[2]


def maxhydra(
    *arguments: str, cwd: Path, python: tuple[str, ...] = (), **extra: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, in a new interpreter if it gets options of its own."""
    if not python:
        return cli.run(*arguments, cwd=cwd, timeout=240, COLUMNS="110", **extra)
    variables = cli.environment(COLUMNS="110", **extra)
    command = [sys.executable, *python, "-m", "maxhydra", *arguments]
    return subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=240)


def imported(done: subprocess.CompletedProcess[str]) -> set[str]:
    """Top-level packages that a process under `-X importtime` imported."""
    return {name.partition(".")[0] for name in re.findall(r"^import time:.*\| +(\S+)$", done.stderr, re.MULTILINE)}


def test_help_lists_everything_and_imports_little(tmp_path: Path) -> None:
    done = maxhydra("--help", cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    for group, paths in groups().items():
        assert group in done.stdout
        for path in paths:
            assert path.stem in done.stdout
    assert "explain" in done.stdout and "Examples:" in done.stdout and "--multirun" in done.stdout
    assert not {"hydra", "omegaconf", "jax", "yaml"} & imported(done)


@pytest.mark.slow
def test_cfg_shows_the_config_without_jax(tmp_path: Path) -> None:
    done = maxhydra("--cfg", "job", "train.steps=77", cwd=tmp_path, python=("-X", "importtime"))
    assert done.returncode == 0
    assert "\n  steps: 77\n" in done.stdout and "optimizer:" in done.stdout and "hydra:" not in done.stdout
    assert "hydra" in imported(done) and "jax" not in imported(done)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_mistakes_end_with_exit_code_2(tmp_path: Path) -> None:
    done = maxhydra(
        "model.num_layer=3",
        "train.steps=-5",
        "data=text",
        "data.path=/nope",
        cwd=tmp_path,
        python=("-X", "importtime"),
    )
    assert done.returncode == 2 and done.stdout == ""
    said = "\n".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
    assert "3 problems" in said and "Traceback" not in said and len(said) < 1500
    for text in ("model.num_layer=3", "'model.num_layers'", "train.steps=-5", "data.path=/nope"):
        assert text in said
    assert "jax" not in imported(done) and list(tmp_path.iterdir()) == []


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == f"maxhydra {__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--multrun"], ["--multrun: no such flag", "did you mean '--multirun'?"]),
        (["--config-path", "x"], ["--config-path: no such flag", "--config-dir"]),
        (["explian"], ["explian: no such command", "did you mean 'explain'?"]),
        (["explain", "optimizer.lerning_rate"], ["no such key", "did you mean 'optimizer.learning_rate'?"]),
        (["explain", "model.kinds.layr.mlp.dim"], ["model.kinds has no 'layr'", "did you mean 'layer'?"]),
        (["--cfg", "jobs"], ["--cfg", "job"]),
        (["--cfg", "job", "-m"], ["takes one of"]),
        (["--resolve"], ["is only used with --cfg"]),
        (["-sc", "install=tcsh"], ["bash"]),
        (["-m", "train.steps=10,-1,x"], ["train.steps=-1: is out of range", "train.steps=x: is not an integer"]),
        pytest.param(
            ["-m", "model.num_heads=4,6", "model.num_kv_heads=4,2"],
            ["model.num_kv_heads=4: does not divide"],
            marks=pytest.mark.exhaustive,
        ),
        (["-m", "model=tiny,tny"], ["model=tny: no such option"]),
        (
            ["-m", "hydra/launcher=slurm", "hydra.launcher.nodes=0", "hydra.launcher.mem=much", "run.seed=1,2"],
            ["hydra.launcher.nodes=0: is out of range", "hydra.launcher.mem=much: is malformed"],
        ),
        pytest.param(
            ["-m", "hydra/launcher=slurm", "hydra.launcher.node=2"],
            ["hydra.launcher.node"],
            marks=pytest.mark.exhaustive,
        ),
        (["hydra.run.dir=x"], ["hydra.run.dir=x: is not used by maxhydra", "run.outputs and run.name"]),
        pytest.param(
            ["-m", "run.seed=1,2", "hydra.job.chdir=true"],
            ["hydra.job.chdir=true: is not used by maxhydra"],
            marks=pytest.mark.exhaustive,
        ),
        (["hydra/launcher=slurm"], ["hydra/launcher=slurm: is only used with -m", "maxhydra -m"]),
        (["hydra.job.env_copy=[UNSET_X]"], ["hydra.job.env_copy=UNSET_X: names an environment variable that is not"]),
        pytest.param(
            ["-m", "run.seed=1,2", "hydra.job.env_copy=[UNSET_X]"],
            ["set it: export UNSET_X=..."],
            marks=pytest.mark.exhaustive,
        ),
        (["+hydra.job.env_set.A=${oc.env:UNSET_X}"], ["hydra.job.env_set.A", "variable 'UNSET_X' not found"]),
        (
            ["-m", "hydra/launcher=slurm", "hydra.launcher.detach=true", "hydra/sweeper=optuna", "run.seed=range(1,3)"],
            ["hydra.launcher.detach=true: a search needs results"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "objective=eval/los", "train.seq_len=int(interval(8,16))"],
            ["objective=eval/los: is not logged by task=pretrain", "did you mean 'eval/loss'?"],
        ),
        (
            ["-m", "hydra/sweeper=optuna", "train.eval_batches=0", "train.seq_len=int(interval(16,8))"],
            ["objective=eval/loss: is not logged, because evaluation is disabled", "train.seq_len"],
        ),
        pytest.param(
            ["-m", "hydra/sweeper=optuna", "hydra.sweeper.objectives=eval/los", "run.seed=range(1,3)"],
            ["hydra.sweeper.objectives=eval/los: is not logged by task="],
            marks=pytest.mark.exhaustive,
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_invalid_command_lines_are_rejected(
    arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    for text in said:
        assert text in captured.err


def test_cfg_prints_a_config_that_fails_validation(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--cfg", "job", "-p", "data", "data=text"]) == 2
    captured = capsys.readouterr()
    assert "source: text" in captured.out and "data.path=null: is needed" in captured.err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--cfg", "job", "-p", "optimizer.schedule"], "kind: cosine"),
        (["-c", "job", "-p", "run.notes", "--resolve", "run.notes=${objective}"], "eval/loss"),
        (["--cfg", "all", "-p", "hydra.run"], "dir: ."),
        (["--info", "defaults"], "model/tiny"),
        (["train.steps=5", "-i", "searchpath"], "pkg://maxhydra.conf"),
        (["--hydra-help"], "Hydra (1."),
        (["-sc", "install=bash"], "complete"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_cfg_and_info_print_the_config(arguments: list[str], said: str, tmp_path: Path) -> None:
    done = maxhydra(*arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert said in done.stdout and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("mod", {"model=", "model.", "models"}),
        ("optimizer=m", {"optimizer=muon"}),
        ("-m optimizer/schedule=c", {"optimizer/schedule=constant", "optimizer/schedule=cosine"}),
        ("optimizer=sgd optimizer.lea", {"optimizer.learning_rate="}),
        ("explain train.st", {"train.steps="}),
        ("expl", {"explain"}),
        ("runs re", {"rerun", "resume", "report"}),
    ],
)
def test_shell_completion(
    line: str, expected: set[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COMP_LINE", f"maxhydra {line}")
    monkeypatch.setattr(sys, "argv", ["maxhydra"])
    assert run(["-sc", "query=bash"]) == 0
    assert set(capsys.readouterr().out.split()) == expected


def test_explain_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "optimizer.learning_rate", "optimizer.learning_rate=0.5"]) == 0
    out = capsys.readouterr().out
    facts = dict(line.split(maxsplit=1) for line in out.replace("set in", "set_in").splitlines()[1:])
    assert out.startswith("optimizer.learning_rate: Peak learning rate.")
    assert facts == {
        "type": "float",
        "accepted": "a number, over 0",
        "default": "0.0003",
        "value": "0.5",
        "set_in": "the command line",
    }


def test_explain_says_which_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "train.steps", "experiment=shakespeare"]) == 0
    place = re.search(r"set in +(\S+):(\d+)", capsys.readouterr().out)
    assert place is not None and place[1].endswith("conf/experiment/shakespeare.yaml")
    assert Path(place[1]).read_text().splitlines()[int(place[2]) - 1].strip().startswith("steps:")


@pytest.mark.parametrize(
    ("path", "said"),
    [
        (
            "optimizer",
            ["options of the group optimizer (adamw is chosen)", "muon", "weight_decay", "Peak learning rate"],
        ),
        ("optimizer/schedule", ["wsd", "warmup_steps"]),
        ("experiment", ["shakespeare", "none is chosen"]),
        ("train", ["log_every", "early_stop"]),
        ("mesh.rules.embed", ["list[str]", "[stage,fsdp,expert,sequence]", "the schema's default"]),
        ("", ["model", "objective"]),
    ],
)
def test_explain_sections_and_groups(path: str, said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", *([path] if path else [])]) == 0
    out = capsys.readouterr().out
    for text in said:
        assert text in out


@pytest.mark.slow
def test_inspect_leaves_nothing_behind(tmp_path: Path) -> None:
    done = maxhydra("task=inspect", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_locales_without_utf8(tmp_path: Path) -> None:
    write_run(tmp_path / "outputs" / "first", tags=["naïve"])
    variables = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}
    done = maxhydra("runs", "list", cwd=tmp_path, python=("-X", "utf8=0"), **variables)
    assert done.returncode == 0 and "na\\xefve" in done.stdout, done.stderr


@pytest.mark.slow
def test_mistake_that_the_task_finds(tmp_path: Path) -> None:
    done = maxhydra("task=inspect", "task.devices=8", "mesh.tensor=3", cwd=tmp_path)
    assert done.returncode == 2
    assert "mesh.tensor=3" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.slow
def test_sweep_folders(tmp_path: Path) -> None:
    """Readable job folders in one sweep folder, plus multirun.yaml of Hydra and sweep.json of `sweep resume` only."""
    done = maxhydra("-m", "task=inspect", "run.name=sizes", "model.num_layers=2,3", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["outputs"]
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == ["sizes"]
    names = {path.name for path in (tmp_path / "outputs" / "sizes").iterdir()}
    assert names == {"multirun.yaml", "sweep.json", "0_num_layers=2", "1_num_layers=3"}
    assert "job 0: task=inspect run.name=sizes model.num_layers=2" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments, said",
    [
        (["run.name=alone/inner"], "is inside the folder of another run"),
        (["run.name=lr"], "is a folder that contains other runs, such as"),
        (["-m", "run.name=alone", "run.seed=1,2"], "is an existing run, not a sweep"),
        pytest.param(
            ["-m", "hydra/sweeper=optuna", "run.name=alone", "run.seed=1,2"],
            "is an existing run, not a sweep",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_runs_are_not_nested(arguments: list[str], said: str, tmp_path: Path) -> None:
    """`runs list` would not find the inner ones, and `runs gc` would take them with the outer one."""
    for name in ("alone", "lr/0_seed=1"):
        write_run(tmp_path / "outputs" / name)
    before = sorted(tmp_path.rglob("*"))
    done = maxhydra(*SMALL, *arguments, cwd=tmp_path)
    assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.exhaustive
def test_failing_job_of_a_sweep(tmp_path: Path) -> None:
    """The other jobs still run; the message is the one that the job alone would give."""
    done = maxhydra("-m", "task=inspect", "task.devices=8", "mesh.tensor=3,2", cwd=tmp_path)
    assert done.returncode == 2
    assert "job 1:" in done.stdout
    assert "mesh.tensor=3" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.exhaustive
def test_the_printed_command_resumes_the_run(tmp_path: Path) -> None:
    small = [*SMALL, "train.steps=2", r"run.notes=two words and \${neither}"]
    first = maxhydra(*small, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    folder = re.search(r"^run: +(\S+)$", first.stdout, re.MULTILINE)
    advice = re.search(r"^next: +maxhydra (.*?) +#", first.stdout, re.MULTILINE)
    assert folder is not None and advice is not None
    assert (tmp_path / folder[1] / "report.html").is_file()
    second = maxhydra(*shlex.split(advice[1]), cwd=tmp_path)
    assert second.returncode == 0, second.stderr
    steps = [json.loads(line)["step"] for line in (tmp_path / folder[1] / "metrics.jsonl").read_text().splitlines()]
    assert sorted(set(steps)) == [1, 2, 3, 4]
    assert [path.name for path in (tmp_path / "outputs").iterdir()] == [Path(folder[1]).name]


def test_a_key_that_is_set_twice_is_an_error(capsys):
    assert run(["train.steps=2", "model=micro", "train.steps=3"]) == 2
    assert "train.steps: is set twice: train.steps=2 and train.steps=3" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["a" * 300, "a <b>", "'a \"b'"])
def test_names_of_new_runs_are_checked(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert run(["model=micro", "train.steps=1", f"run.name={quoted(name)}"]) == 2
    assert "accepted: letters, digits, - _ . = , + and /" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_a_model_beyond_the_limits_is_rejected(capsys):
    assert run(["task=inspect", "model=micro", "model.num_layers=1000000000"]) == 2
    assert "at most 10000" in capsys.readouterr().err
    assert (
        run(["task=inspect", "model=micro", "model.num_layers=10000", "model.emb_dim=1000000", "model.mlp_dim=4000000"])
        == 2
    )
    assert "parameters" in capsys.readouterr().err


@pytest.mark.slow
def test_a_model_larger_than_the_memory_is_rejected(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sizes = ["model.emb_dim=65536", "model.mlp_dim=262144", "model.num_layers=500"]
    assert run(["model=micro", *sizes, "run.name=big", "train.steps=1"]) == 2
    error = capsys.readouterr().err
    assert "needs at least" in error and "bytes) for weights and optimizer state" in error and "try" in error
    assert not (tmp_path / "outputs" / "big").exists()


def test_outputs_that_cannot_be_written_are_one_message(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert run(["model=micro", "run.outputs=file/x", "train.steps=1"]) == 1
    assert "Not a directory" in (error := capsys.readouterr().err) and "Traceback" not in error
