"""How a process ends because of another one: its exit code, its last message, and its end without the main thread."""

import contextlib
import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable

from maxhydra.config import ConfigError

EXIT_LOST = os.EX_TEMPFAIL
# Exit code of an invalid config, as of every command.
EXIT_WRONG_CONFIG = 2
# Time to record the end of the run and print it.
REPORT_SECONDS = 30.0


def describe_error(error: BaseException | None) -> tuple[str | None, int]:
    """The message of the other processes about an error, and their exit code: only an interrupted run is restarted."""
    if isinstance(error, ConfigError):
        return "; ".join(map(str, error.problems))[:4000], EXIT_WRONG_CONFIG
    text = None if error is None else f"{type(error).__name__}: {error}".partition("\n")[0][:500].rstrip(": ")
    return text, 1 if isinstance(error, Exception) else EXIT_LOST


def delay_aborts() -> None:
    """Give other threads six seconds to end the process with a reason when native code aborts it.

    The client of jax.distributed aborts about a second after the death of process 0. It would call a handler in Python
    only in the main thread, so the handler is `sleep` of the C library, whose argument is the number of the signal.
    """
    library = ctypes.CDLL(None)
    library.signal.argtypes, library.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
    library.signal(signal.SIGABRT, ctypes.cast(library.sleep, ctypes.c_void_p))


def exit_at_once(code: int) -> None:
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(code)


def exit_with_reason(reason: str, record: Callable[[str], None] | None, *, code: int) -> None:
    """Record and print the reason, and end the process without its main thread, which may hang."""

    def report() -> None:
        with contextlib.suppress(Exception):
            if record is not None:
                record(reason)
        with contextlib.suppress(Exception):
            hint = "; run the same command again to resume" if code == EXIT_LOST else ""
            print(f"maxhydra: {reason}{hint}", file=sys.stderr, flush=True)
            sys.stdout.flush()

    # A disk or a terminal that hangs must not keep the process alive.
    reporter = threading.Thread(target=report, name="exit", daemon=True)
    reporter.start()
    reporter.join(REPORT_SECONDS)
    os._exit(code)
