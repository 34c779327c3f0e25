"""Property tests with limits: `@fuzz(...)` runs a test on generated cases, each under a guard.

A case passes if the test returns, or raises one of the exceptions that `rejects` names with a message of reasonable
length. Every other exception, a case over MAX_SECONDS and one that allocates more than MAX_BYTES fail.

    @fuzz(cases=50, overrides=st.lists(st.text()))
    def test_overrides(overrides):
        compose(overrides)

The short form, part of `pytest`, runs `cases` fixed examples. The long form (scripts/fuzz.py) divides its number of
cases among the tests in proportion to `cases` and draws them at random; it passes its settings in the environment.
"""

import contextlib
import dataclasses
import faulthandler
import functools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.errors import UnsatisfiedAssumption
from hypothesis.strategies import SearchStrategy

from maxhydra.config.errors import ConfigError

# Number of cases of each test in the long form.
CASES_VARIABLE = "MAXHYDRA_FUZZ_CASES"
# File for the outcome of a process of the long form; the current case is written next to it with the suffix .case.
LOG_VARIABLE = "MAXHYDRA_FUZZ_LOG"

MAX_SECONDS = 10.0
MAX_BYTES = 4 * 2**30
MAX_MESSAGE = 10_000
# A case that does not return to Python cannot be interrupted: the process of the long form ends after this time.
MAX_BLOCKED_SECONDS = 60.0

_CHECKS = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
settings.register_profile("short", deadline=None, database=None, derandomize=True, suppress_health_check=_CHECKS)
settings.register_profile("long", settings.get_profile("short"), derandomize=False, print_blob=False)


@dataclasses.dataclass
class CaseStats:
    """What the cases of one test did."""

    cases: int = 0
    rejected: int = 0
    slowest_seconds: float = 0.0
    slowest_case: str = ""


# By the node id of the test.
CASE_STATS: dict[str, CaseStats] = {}


class OverTime(BaseException):
    """Raised by the timer. Not an Exception, so that the tested code does not handle it."""


def is_long() -> bool:
    return CASES_VARIABLE in os.environ


def load_profile() -> None:
    settings.load_profile("long" if is_long() else "short")


def fuzz(
    cases: int = 40, *, rejects: tuple[type[Exception], ...] = (ConfigError,), **strategies: SearchStrategy
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorate a test: `cases` examples of `strategies` in the short form, each under the guard.

    Choose `cases` so that the short form takes one or two seconds. Fixtures are shared by all cases of a test.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def guarded(*args: Any, **arguments: Any) -> None:
            run_case(functools.partial(test, *args), arguments, rejects)

        number = int(os.environ.get(CASES_VARIABLE, cases))
        fuzz_test: Any = settings(settings.default, max_examples=number)(given(**strategies)(guarded))
        fuzz_test.fuzz_cases = cases
        return fuzz_test

    return decorate


def run_case(test: Callable[..., None], arguments: dict[str, Any], rejects: tuple[type[Exception], ...]) -> None:
    """Run one case under the guard and count it."""
    name = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")[0]
    stats = CASE_STATS.setdefault(name, CaseStats())
    _write_current_case(arguments)
    rejection = None
    started = time.perf_counter()
    try:
        with _time_limit(), _memory_limit():
            test(**arguments)
    except rejects as error:
        rejection = error
    except UnsatisfiedAssumption:
        raise
    except OverTime:
        raise AssertionError(f"the case took over {MAX_SECONDS:.0f} s") from None
    except SystemExit as error:
        raise AssertionError(f"the case ended the process with {error.code!r}") from error
    finally:
        seconds = time.perf_counter() - started
        if seconds > stats.slowest_seconds:
            stats.slowest_seconds, stats.slowest_case = seconds, _shorten(_describe(arguments))
    stats.cases += 1
    if rejection is not None:
        stats.rejected += 1
        length = len(str(rejection))
        assert 0 < length <= MAX_MESSAGE, f"the message of {type(rejection).__name__} has {length} characters"


def peak_bytes() -> int:
    """Largest resident memory so far of this process and of its children that have ended."""
    unit = 1024 if sys.platform == "linux" else 1
    return unit * max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def write_outcome(failures: dict[str, str]) -> None:
    """Write the all_stats and failures of this process for scripts/fuzz.py."""
    all_stats = {name: dataclasses.asdict(stats) for name, stats in CASE_STATS.items()}
    outcome = {"tests": all_stats, "failures": failures, "peak_bytes": peak_bytes()}
    Path(os.environ[LOG_VARIABLE]).write_text(json.dumps(outcome))


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    """Raise OverTime in the main thread after MAX_SECONDS."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: Any) -> None:
        raise OverTime

    before = signal.signal(signal.SIGALRM, stop)
    if LOG_VARIABLE in os.environ:
        faulthandler.dump_traceback_later(MAX_BLOCKED_SECONDS, exit=True)
    signal.setitimer(signal.ITIMER_REAL, MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        if LOG_VARIABLE in os.environ:
            faulthandler.cancel_dump_traceback_later()
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _memory_limit() -> Iterator[None]:
    """Limit the writable memory to MAX_BYTES more than now; allocations beyond that raise MemoryError."""
    if sys.platform != "linux":
        yield
        return
    # RLIMIT_DATA counts writable private pages; RLIMIT_AS would also count the address space that libraries reserve.
    pages = int(Path("/proc/self/statm").read_text().split()[5])
    before = resource.getrlimit(resource.RLIMIT_DATA)
    limit = pages * resource.getpagesize() + MAX_BYTES
    if before[1] != resource.RLIM_INFINITY:
        limit = min(limit, before[1])
    resource.setrlimit(resource.RLIMIT_DATA, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, before)


def _write_current_case(arguments: dict[str, Any]) -> None:
    """Record the current case, to be read if the process dies in it."""
    if LOG_VARIABLE in os.environ:
        Path(f"{os.environ[LOG_VARIABLE]}.case").write_text(_shorten(_describe(arguments), 2000))


def _describe(arguments: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())


def _shorten(text: str, length: int = 300) -> str:
    text = text.encode("utf-8", "backslashreplace").decode()
    return text if len(text) <= length else f"{text[:length]}... ({len(text)} characters)"
