"""CPU seconds of each test: `MAXHYDRA_TEST_TIMES=FILE pytest` writes a line `seconds phase test` for each.

Wall times say little on a machine that does other work. The time of child processes is included, also of those that
the fork server starts. tests/conftest.py loads this module as a plugin.
"""

import os
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.fork_server import TIMES_VARIABLE

VARIABLE = "MAXHYDRA_TEST_TIMES"


def pytest_configure() -> None:
    if VARIABLE in os.environ:
        os.environ[TIMES_VARIABLE] = tempfile.mkstemp(prefix="maxhydra-times-")[1]


def pytest_unconfigure() -> None:
    if path := os.environ.pop(TIMES_VARIABLE, None):
        Path(path).unlink()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[Any]:
    return (yield from _measure(item, "setup"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    return (yield from _measure(item, "call"))


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    return (yield from _measure(item, "teardown"))


def _measure(item: pytest.Item, phase: str) -> Iterator[Any]:
    started = _cpu_seconds()
    try:
        return (yield)
    finally:
        if path := os.environ.get(VARIABLE):
            with open(path, "a") as file:
                file.write(f"{_cpu_seconds() - started:.2f} {phase} {item.nodeid}\n")


def _cpu_seconds() -> float:
    if VARIABLE not in os.environ:
        return 0.0
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    commands = Path(os.environ[TIMES_VARIABLE]).read_text().split()
    return sum(usage.ru_utime + usage.ru_stime for usage in usages) + sum(map(float, commands))
