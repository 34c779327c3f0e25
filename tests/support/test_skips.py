"""The skip policy of tests/support/skips.py, in a pytest of its own on small test files."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = {
    "test_module.py": """
        from tests.support.skips import import_optional

        import_optional("absent_package.part", extra="parity")

        def test_in_module(): pass
    """,
    "test_single.py": """
        import pytest
        from tests.support import skips

        @pytest.fixture
        def program(): pytest.skip("needs program: apt-get install program")

        def test_fixture(program): pass

        def test_package(): skips.import_optional("other_package", extra="data")

        @pytest.mark.skipif(True, reason=skips.GPU)
        def test_gpu(): pass

        @pytest.mark.xfail(reason="known")
        def test_xfail(): raise ValueError

        def test_passes(): pass
    """,
    "test_model.py": """
        import pytest
        from tests.support import skips

        pytest.skip(skips.SMOLLM2, allow_module_level=True)
    """,
}
REASONS = {
    "test_module.py": "needs absent-package: pip install -e '.[parity]'",
    "test_single.py::test_fixture": "needs program: apt-get install program",
    "test_single.py::test_package": "needs other-package: pip install -e '.[data]'",
}


def run_pytest(folder: Path, *arguments: str, skips: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONPATH": str(ROOT), "MAXHYDRA_SKIPS": skips}
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.skips", "-p", "no:cacheprovider", "-rs", *arguments]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=240, check=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(textwrap.dedent(text))
    return tmp_path


# Without workers, pytest stops at errors of collection unless asked to continue.
ONE, TWO = ("-n", "0", "--continue-on-collection-errors"), ("-n", "2", "--dist", "worksteal")


@pytest.mark.slow
@pytest.mark.default_cases("one process")
@pytest.mark.parametrize("arguments", [ONE, TWO], ids=["one process", "two workers"])
def test_a_forbidden_skip_fails_with_test_and_reason(folder: Path, arguments: tuple[str, ...]) -> None:
    done = run_pytest(folder, *arguments, skips="forbidden")
    assert done.returncode == 1, done.stdout
    for test, reason in REASONS.items():
        message = f"{test} was skipped, which MAXHYDRA_SKIPS=forbidden rejects: {reason}"
        assert done.stdout.count(message) == 1, done.stdout
    assert "1 failed, 1 passed, 2 skipped, 1 xfailed, 2 errors" in done.stdout


@pytest.mark.slow
def test_skips_are_allowed_by_default(folder: Path) -> None:
    done = run_pytest(folder, "-n", "0", skips="")
    assert done.returncode == 0, done.stdout
    assert all(reason in done.stdout for reason in REASONS.values())
    assert "1 passed, 5 skipped, 1 xfailed" in done.stdout


def test_ci_runs_the_command_of_the_readme() -> None:
    command = "pip install -e '.[test]' && pytest"
    assert f"`{command}`" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert f"\n({command})" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
