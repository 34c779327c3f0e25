"""The guard of the fuzz suite, and the division of cases among processes."""

import time

import numpy as np
import pytest

from maxhydra.config.errors import ConfigError, Problem
from scripts import fuzz as script
from tests.support import fuzzing


def outcome_of(test, **arguments):
    """Run a case; returns the exception that failed it."""
    try:
        fuzzing.run_case(test, arguments, (ConfigError,))
    except (Exception, SystemExit) as error:
        return error
    return None


@pytest.fixture(autouse=True)
def tallies(monkeypatch):
    monkeypatch.setattr(fuzzing, "CASE_STATS", {})
    monkeypatch.setattr(fuzzing, "MAX_SECONDS", 0.2)
    return lambda: next(iter(fuzzing.CASE_STATS.values()))


def raise_config_error(text):
    raise ConfigError(Problem("a.b", text))


def test_accepted_and_rejected_cases_are_counted(tallies):
    assert outcome_of(lambda text: None, text="good") is None
    assert outcome_of(raise_config_error, text="is wrong") is None
    assert (tallies().cases, tallies().rejected) == (2, 1)


def test_endless_message_fails():
    assert "has 20" in str(outcome_of(raise_config_error, text="x" * 20_000))


def test_other_exceptions_fail():
    assert isinstance(outcome_of(lambda number: 1 / number, number=0), ZeroDivisionError)
    assert "ended the process with 2" in str(outcome_of(lambda code: exit(code), code=2))


def test_slow_case_fails_although_the_code_catches_exceptions(tallies):
    def wait(seconds):
        try:
            time.sleep(seconds)
        except Exception:
            time.sleep(seconds)

    assert "took over" in str(outcome_of(wait, seconds=60))
    assert 0.2 <= tallies().slowest_seconds < 60 and "seconds=60" in tallies().slowest_case


def test_allocation_over_the_limit_fails_and_the_limit_ends_with_the_case(monkeypatch):
    monkeypatch.setattr(fuzzing, "MAX_BYTES", 2**28)
    assert isinstance(outcome_of(lambda count: np.ones(count, np.uint8), count=2**29), MemoryError)
    assert np.ones(2**29, np.uint8)[-1] == 1


def test_cases_are_divided_in_proportion_and_seeds_differ():
    chunks = script.divide({"a": 100, "b": 1}, cases=10_100, chunk=2000, seed=7)
    totals = {test: sum(chunk.cases for chunk in chunks if chunk.test == test) for test in "ab"}
    assert totals == {"a": 10_000, "b": 100}
    assert max(chunk.cases for chunk in chunks) <= 2000 and max(c.cases for c in chunks if c.test == "b") <= 20
    assert len({chunk.seed for chunk in chunks}) == len(chunks)
