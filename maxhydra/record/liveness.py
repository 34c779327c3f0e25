"""Check whether the process that writes a run is still alive."""

import contextlib
import datetime
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Seconds after which a `running` run on another host counts as lost. Longer than any compilation.
LOST_SECONDS = 3600


def process_start(pid: int) -> str | None:
    """Start time of a process, as recorded by the operating system; distinguishes processes that reuse a pid.

    None if the system has no /proc.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return None
    # The process name in parentheses may contain spaces; the start time is field 22, which is number 20 after it.
    return f"{boot}/{stat.rpartition(')')[2].split()[19]}"


def is_alive(host: str, pid: int, started: str | None) -> bool | None:
    """True if the process is running; None if it is on another host."""
    if host != socket.gethostname():
        return None
    # A PermissionError means that the process exists but belongs to another user.
    with contextlib.suppress(PermissionError):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
    return started is None or process_start(pid) == started


def is_lost(session: Mapping[str, Any], updated: str) -> bool:
    """True if the process of a `running` session is gone; `updated` is the time run.json was last written."""
    alive = is_alive(session["host"], session["pid"], session["pid_started"])
    if alive is not None:
        return not alive
    silence = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(updated)
    return silence.total_seconds() > LOST_SECONDS
