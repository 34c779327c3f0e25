"""`maxhydra new`: a project that installs, runs and passes its tests in a fresh virtual environment."""

import site
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cli import ROOT, environment, run


def test_names_that_cannot_be_projects_are_rejected(tmp_path: Path) -> None:
    for name, reason in {"My-Project": "is not the name of a package", "tiny": "is the name of an option"}.items():
        done = run("new", name, cwd=tmp_path)
        assert done.returncode == 2 and reason in done.stderr, done.stderr
    (tmp_path / "words").mkdir()
    assert "already exists" in run("new", "words", cwd=tmp_path).stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["words"]


@pytest.mark.exhaustive
def test_a_new_project_installs_runs_and_passes_its_tests(tmp_path: Path) -> None:
    assert run("new", "my_words", cwd=tmp_path).returncode == 0
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}

    def call(*command: str) -> str:
        done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=500)
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    call(sys.executable, "-m", "venv", "--without-pip", "env")
    python = tmp_path / "env" / "bin" / "python"
    # The packages of this environment, and maxhydra itself, without installing them again.
    packages = Path(call(str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "shared.pth").write_text("\n".join([*site.getsitepackages(), str(ROOT)]) + "\n")
    install = (
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--prefix",
        str(tmp_path / "env"),
        "./my_words",
    )
    call(str(python), "-m", "pip", *install)
    help_text = call(str(python), "-m", "maxhydra", "--help")
    assert "experiment=my_words" in help_text
    call(str(python), "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "my_words/tests")
