"""The fuzz suite: profiles of hypothesis, and the files that scripts/fuzz.py reads.  See tests/support/fuzzing.py."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import fuzzing

# File for the tests of the suite and their shares of the long form's cases; written after a collection.
PLAN_VARIABLE = "MAXHYDRA_FUZZ_PLAN"

FAILURES: dict[str, str] = {}

fuzzing.load_profile()


def pytest_collection_finish(session: pytest.Session) -> None:
    if path := os.environ.get(PLAN_VARIABLE):
        tests = {item.nodeid: getattr(getattr(item, "function", None), "fuzz_cases", 0) for item in session.items}
        Path(path).write_text(json.dumps({name: cases for name, cases in tests.items() if cases}))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[Any]:
    report = yield
    if report.failed:
        FAILURES[item.nodeid] = report.longreprtext
    return report


def pytest_sessionfinish() -> None:
    if fuzzing.LOG_VARIABLE in os.environ:
        fuzzing.write_outcome(FAILURES)
