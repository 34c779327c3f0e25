"""Whether the process that wrote a run is still there."""

import contextlib
import datetime
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# A run on another host whose run.json is older than this, and still says running, is lost. Longer than any compilation.
LOST_SECONDS = 3600


def process_start(pid: int) -> str | None:
    """When a process started, in the kernel's own words: tells it from a later one that was given the same number.

    None where the system does not say (no /proc).
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The name, in brackets, may hold spaces; the start time is field 22 of the line, 20 after it.
    return f"{boot}/{stat.rpartition(')')[2].split()[19]}"


def is_alive(host: str, pid: int, started: str | None) -> bool | None:
    """Whether that process runs; None where it cannot be known from here, on another host."""
    if host != socket.gethostname():
        return None
    # A process of another user is there too, and may not be signalled.
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return started is None or process_start(pid) == started


def is_lost(session: Mapping[str, Any], updated: str) -> bool:
    """Whether the process of a session that says running is gone; `updated` is when run.json was last written."""
    alive = is_alive(session["host"], session["pid"], session["pid_started"])
    if alive is not None:
        return not alive
    silent = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(updated)
    return silent.total_seconds() > LOST_SECONDS
