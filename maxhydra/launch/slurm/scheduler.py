"""Wrappers around SLURM's commands that report failures as one-line problems."""

import dataclasses
import logging
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from maxhydra.config.errors import ConfigError, Problem

log = logging.getLogger("maxhydra")

# States that a job never leaves.
TERMINAL_STATES = {
    "BOOT_FAIL",
    "CANCELLED",
    "COMPLETED",
    "DEADLINE",
    "FAILED",
    "NODE_FAIL",
    "OUT_OF_MEMORY",
    "PREEMPTED",
}
TERMINAL_STATES |= {"REVOKED", "TIMEOUT"}
TIMEOUT_SECONDS = 60
# Environment variables that select the cluster.
CLUSTER_VARIABLES = ("SLURM_CLUSTERS", "SLURM_CONF")
# Job name and array index.
Key = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """State of a job in the scheduler."""

    id: str
    """Job id as displayed: 12, or 12_3 in an array."""
    state: str
    reason: str = ""

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.state == "PENDING" and self.reason not in ("", "None") else ""
        return f"slurm {self.id} {self.state}{why}"


class Queue:
    """Jobs of this user known to the scheduler, refreshed when older than `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._entries: dict[Key, Entry] = {}
        self._queried_at: float | None = None

    def find(self, key: Key) -> Entry | None:
        if self._queried_at is None or time.monotonic() - self._queried_at > self._seconds:
            self._refresh()
        return self._entries.get(key)

    def invalidate(self) -> None:
        """Force a refresh on the next lookup."""
        self._queried_at = None

    def _refresh(self) -> None:
        try:
            # Includes recently ended jobs; one line per array task.
            lines = _output("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%j|%i|%K|%T|%r")
        except ConfigError as error:
            if not self._entries:
                raise
            # An unresponsive scheduler has not lost its jobs: keep the last known state.
            log.warning("%s", error.problems[0])
        else:
            self._entries = dict(map(_entry, lines))
        self._queried_at = time.monotonic()


def _entry(line: str) -> tuple[Key, Entry]:
    name, identity, index, state, reason = line.split("|", 4)
    return (name, int(index) if index.isdecimal() else 0), Entry(identity, state, reason)


def submit(script: Path) -> str:
    """Submit a batch script and return its job id."""
    # Inside a SLURM job, inherited SLURM_* variables would override the script's parameters.
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in CLUSTER_VARIABLES
    }
    # --parsable prints the id, optionally followed by a semicolon and the cluster.
    return _output("sbatch", "--parsable", str(script), env=inherited)[-1].partition(";")[0]


def cancel(ids: Sequence[str]) -> None:
    """Cancel jobs: SIGTERM, then SIGKILL after the cluster's KillWait. A job may have ended in the meantime."""
    try:
        _output("scancel", *ids)
    except ConfigError as error:
        log.warning("%s", error.problems[0])


def accounting_state(identity: str) -> str | None:
    """State of a job that has left the queue, from accounting; None without accounting."""
    try:
        lines = _output("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", identity, "--format=State")
    except ConfigError:
        return None
    # `CANCELLED by 1000`
    return lines[-1].split()[0] if lines and lines[-1] else None


def _output(*command: str, env: Mapping[str, str] | None = None) -> list[str]:
    """Run a command and return its output lines; raises ConfigError with its stderr as one line."""
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=True, env=env)
    except FileNotFoundError:
        hint = "run this on a login node with SLURM installed, or run jobs locally with hydra/launcher=basic"
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name} is not installed", hint=hint)) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name} timed out after {TIMEOUT_SECONDS} s")) from None
    except subprocess.CalledProcessError as error:
        stderr = "; ".join(re.sub(r"^\w+: (error|fatal): ", "", line) for line in error.stderr.strip().splitlines())
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name}: {stderr or error.returncode}")) from None
    return done.stdout.splitlines()
