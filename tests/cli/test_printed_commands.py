"""Every command that maxhydra prints can be pasted in the same folder: the commands are collected and run."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest

from maxhydra.cli.run_job import _next_steps
from maxhydra.config.compose.composer import compose
from maxhydra.record import RunDirectory
from maxhydra.tasks._runner import Result
from tests.support import cli
from tests.support.run_folders import write_run
from tests.support.skips import import_optional

import_optional("optuna", extra="sweep")

EXPERIMENT = """# @package _global_
defaults:
- override /model: micro
train:
  steps: 1
  seq_len: 16
  per_device_batch_size: 2
  eval_batches: 1
optimizer:
  schedule:
    warmup_steps: 0
"""
SHORT = "# @package _global_\ntrain:\n  log_every: 1\n"
# A command at the start of a line or after a label, up to a comment, a semicolon or the end of the line.
COMMAND = re.compile(r"(?:^ *|: +)((?:cd \S+ && )?maxhydra (?!--help)\S.*?)(?= +#|;|$)", re.MULTILINE)


class Shell:
    """A folder with an experiment in conf/, and the commands that were printed there and not run yet."""

    def __init__(self, folder: Path):
        self.folder, self.printed = folder, list[str]()
        for file, text in (("conf/experiment/poem", EXPERIMENT), ("more/debug/short", SHORT)):
            path = folder / f"{file}.yaml"
            path.parent.mkdir(parents=True)
            path.write_text(text)

    def run(self, *arguments: str, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        done = cli.run(*arguments, cwd=cwd or self.folder)
        assert done.returncode == code, f"{arguments}\n{done.stdout}\n{done.stderr}"
        self.printed += COMMAND.findall(f"{done.stdout}\n{done.stderr}")
        return done

    def paste(self) -> list[str]:
        """Run the commands that were printed so far; returns them. What they print is not run again."""
        commands, self.printed = list(dict.fromkeys(self.printed)), []
        for command in commands:
            folder, _, line = command.rpartition(" && ")
            where = Path(shlex.split(folder)[1]) if folder else self.folder
            self.run(*shlex.split(line)[1:], cwd=where)
        self.printed = []
        return commands


@pytest.mark.exhaustive
def test_commands_of_a_run_with_options_of_its_own(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    shell.run("--config-dir", "conf", "experiment=poem", "run.name=a", "run.outputs=my/runs")
    shell.run("hydra.searchpath=[file://conf]", "experiment=poem", "run.name=b")
    assert len(shell.paste()) == 2 and sorted(cli.losses(tmp_path / "my" / "runs" / "a")) == [1, 2]
    assert sorted(cli.losses(tmp_path / "outputs" / "b")) == [1, 2]
    shell.run("runs", "best", "-o", "my/runs", "a=b", code=2)
    shell.run("runs", "resume", "-o", "my/runs", "a", "train.steps=3", "--dry-run")
    shell.run("runs", "resume", "b", "train.steps=3", "--dry-run")
    shell.run("runs", "rerun", "b", "--anyway", "--dry-run")
    assert len(shell.paste()) == 3
    assert sorted(cli.losses(tmp_path / "my" / "runs" / "a")) == [1, 2, 3]
    assert len([*(tmp_path / "outputs").glob("*/run.json")]) == 2


@pytest.mark.exhaustive
def test_commands_of_a_search(tmp_path: Path) -> None:
    """The winner is rerun outside of its sweep, whose status does not mind other folders."""
    shell = Shell(tmp_path)
    options = ["--config-dir", "conf", "hydra.searchpath=[file://more]", "experiment=poem", "debug=short"]
    search = ["hydra/sweeper=optuna", "hydra.sweeper.trials=1", "optimizer.learning_rate=1e-3,2e-3"]
    shell.run("-m", *options, *search, "run.name=s", "run.outputs=x")
    shell.run("-m", *options, *search, "run.name=s", "run.outputs=x", "run.seed=1", code=2)
    shell.run("sweep", "cancel", "x/s")
    shell.run("runs", "best", "-o", "x", "sweep=s")
    commands = shell.paste()
    best, more, resume, again = commands
    assert more == "maxhydra sweep resume x/s --trials 2"
    assert resume == "maxhydra sweep resume x/s" and "'\"'\"'" not in best + again
    assert len([*(tmp_path / "x").glob("*/run.json")]) == 1 and len([*(tmp_path / "x" / "s").glob("*/run.json")]) == 2
    assert len([*(tmp_path / "outputs").glob("*/run.json")]) == 1
    (tmp_path / "x" / "s" / "by-hand").mkdir()
    (tmp_path / "x" / "s" / "by-hand" / "run.json").write_text("{}")
    assert "by-hand" not in shell.run("sweep", "status", "x/s").stdout


def test_a_run_of_epochs_is_continued_by_epochs(tmp_path: Path) -> None:
    """train.epochs replaces train.steps, so that the same epochs with more steps would be the same run."""
    path = write_run(tmp_path / "first", overrides=["train.epochs=2"])
    (path / "checkpoints").mkdir()
    config = compose(["train.epochs=2", f"run.outputs={tmp_path}"]).config
    result = Result(path, "finished", "", None, writes=True)
    (line,) = (line for line in _next_steps(result, RunDirectory(path), config) if line.startswith("next:"))
    assert "train.epochs=4" in line and "train.epochs=2" not in line and "train.steps" not in line
