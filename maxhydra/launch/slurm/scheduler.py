"""SLURM's commands, and their errors in one line."""

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

# States that a job does not leave again.
OVER = {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"}
OVER |= {"REVOKED", "TIMEOUT"}
SECONDS = 60
# Variables of SLURM that say which cluster is meant.
KEPT = ("SLURM_CLUSTERS", "SLURM_CONF")
# Name of a job and its place in the array.
Key = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class Entry:
    """What the scheduler says of a job."""

    id: str
    """As a person writes it: 12, or 12_3 in an array."""
    state: str
    reason: str = ""

    def __str__(self) -> str:
        why = f" ({self.reason})" if self.state == "PENDING" and self.reason not in ("", "None") else ""
        return f"slurm {self.id} {self.state}{why}"


class Queue:
    """The jobs of this user that the scheduler knows; asked again when the answer is older than `seconds`."""

    def __init__(self, seconds: float):
        self._seconds = seconds
        self._entries: dict[Key, Entry] = {}
        self._asked: float | None = None

    def find(self, key: Key) -> Entry | None:
        if self._asked is None or time.monotonic() - self._asked > self._seconds:
            self._ask()
        return self._entries.get(key)

    def forget(self) -> None:
        """Something was changed: ask again."""
        self._asked = None

    def _ask(self) -> None:
        try:
            # Those that ended lately too; every job of an array on a line of its own.
            lines = _output("squeue", "--me", "--noheader", "--array", "--states=all", "--format=%j|%i|%K|%T|%r")
        except ConfigError as error:
            if not self._entries:
                raise
            # A scheduler that does not answer has not lost its jobs.
            log.warning("%s", error.problems[0])
        else:
            self._entries = dict(map(_entry, lines))
        self._asked = time.monotonic()


def _entry(line: str) -> tuple[Key, Entry]:
    name, identity, index, state, reason = line.split("|", 4)
    return (name, int(index) if index.isdecimal() else 0), Entry(identity, state, reason)


def submit(script: Path) -> str:
    """The id of a script that was submitted."""
    # Whoever submits may be in a job, whose own shape would be taken for what is asked.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_") or name in KEPT}
    # --parsable: the id, and after a semicolon the cluster.
    return _output("sbatch", "--parsable", str(script), env=inherited)[-1].partition(";")[0]


def cancel(ids: Sequence[str]) -> None:
    """Out of the queue, or ended: SIGTERM, and SIGKILL after the cluster's KillWait. One may just have ended itself."""
    try:
        _output("scancel", *ids)
    except ConfigError as error:
        log.warning("%s", error.problems[0])


def past_state(identity: str) -> str | None:
    """What accounting says of a job that the scheduler has forgotten; None where there is no accounting."""
    try:
        lines = _output("sacct", "--noheader", "--parsable2", "--allocations", "--jobs", identity, "--format=State")
    except ConfigError:
        return None
    # `CANCELLED by 1000`
    return lines[-1].split()[0] if lines and lines[-1] else None


def _output(*command: str, env: Mapping[str, str] | None = None) -> list[str]:
    """The lines that a command prints; its complaint as one line where it fails."""
    name = command[0]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=True, env=env)
    except FileNotFoundError:
        hint = "a machine that submits jobs has SLURM's commands; hydra/launcher=basic runs jobs here"
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name} is not installed", hint=hint)) from None
    except subprocess.TimeoutExpired:
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name} has not answered for {SECONDS} s")) from None
    except subprocess.CalledProcessError as error:
        said = "; ".join(re.sub(r"^\w+: (error|fatal): ", "", line) for line in error.stderr.strip().splitlines())
        raise ConfigError(Problem("hydra/launcher=slurm", f"{name}: {said or error.returncode}")) from None
    return done.stdout.splitlines()
