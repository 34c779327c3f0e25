"""A file that one process at a time may hold."""

import fcntl
import os
from pathlib import Path


def take_lock(path: Path) -> int | None:
    """A handle that holds the lock until it is closed; BlockingIOError where another process holds it.

    A lock of the process, not of the handle: it ends with the process, and forked workers do not hold it. None on a
    file system without locks: go on unprotected, as any program there does.
    """
    handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        os.close(handle)
        return None
    return handle
