"""The tiers of tests/support/tiers.py, in a separate pytest on a small test file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TESTS = """
import pytest

def test_quick(): pass

@pytest.mark.slow
def test_slow(): pass

@pytest.mark.exhaustive
def test_more(): pass

@pytest.mark.default_cases("b")
@pytest.mark.parametrize("case", ["a", "b"])
def test_cases(case): pass
"""


def collect(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "tests.support.tiers"]
    command += ["-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
    return subprocess.run(
        [*command, *arguments], cwd=folder, env={**env, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


@pytest.mark.slow
@pytest.mark.default_cases("not exhaustive-expected1")
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("not slow", {"test_quick", "test_cases[b]"}),
        ("not exhaustive", {"test_quick", "test_slow", "test_cases[b]"}),
        ("exhaustive", {"test_more", "test_cases[a]"}),
    ],
)
def test_tests_of_an_expression(expression: str, expected: set[str], tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    done = collect(tmp_path, "-m", expression)
    assert {line.partition("::")[2] for line in done.stdout.splitlines() if "::" in line} == expected, done.stdout


@pytest.mark.slow
def test_a_case_that_does_not_exist_is_an_error_unless_single_tests_are_named(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS.replace('default_cases("b")', 'default_cases("b", "c")'))
    done = collect(tmp_path)
    assert done.returncode == 4 and "{'test_it.py::test_cases': ['c']}" in done.stderr, done.stdout + done.stderr
    assert collect(tmp_path, "test_it.py::test_cases[a]").returncode == 0
