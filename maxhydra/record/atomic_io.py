"""Atomic file writes, locks, strict JSON of bounded size, format versions, and liveness of processes.

run.json, sweep.json and a checkpoint's manifest.json carry `format`, an integer that grows when a reader of an earlier
version would misread the file, and `maxhydra`, the version that wrote it. Files without `format` have format 1: they
were written before the field existed. Files are migrated in memory and never rewritten.
"""

import contextlib
import datetime
import fcntl
import json
import math
import os
import socket
import tempfile
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from typing import Any, SupportsFloat

import maxhydra

# JSON cannot represent these numbers; they are stored as strings that float() parses.
NONFINITE = ("NaN", "Infinity", "-Infinity")
# Bytes of a JSON file that is read as a whole, by default; the largest config.json known has 0.1 MB.
MAX_JSON_BYTES = 2**26


def replace_file(path: os.PathLike[str] | str, text: str) -> None:
    """Replace a file atomically: write a temporary file, fsync, rename. Readers see the old text or the new one."""
    folder = os.path.dirname(os.path.abspath(path))
    handle, temporary = tempfile.mkstemp(dir=folder, prefix=f".{os.path.basename(path)}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), 0o644)  # mkstemp's 0600 would hide the run from the rest of a team.
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        if isinstance(error, OSError):  # an error of write() does not name the file
            raise type(error)(error.errno, error.strerror, os.fspath(path)) from error
        raise
    _sync_folder(folder)


def _sync_folder(folder: str) -> None:
    """Make the rename durable. Ignored on network file systems that do not support fsync on folders."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def acquire_lock(path: Path) -> int | None:
    """Lock a file exclusively until the returned handle is closed; BlockingIOError if another process holds it.

    The lock belongs to the process, not to the handle: it ends with the process, and forked workers do not hold it.
    Returns None on a file system without locks, where the caller proceeds unprotected.
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


def read_json(path: os.PathLike[str] | str, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file that others may have written; ValueError says why its content is rejected."""
    with open(path, "rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ValueError(f"has more than {max_bytes} bytes")
    return parse_json(content)


def parse_json(content: bytes) -> Any:
    """Parse JSON in UTF-8; every failure is a ValueError whose message is one line.

    Half of a surrogate pair, which JSON can escape and no file or terminal can hold, becomes a question mark.
    """
    try:
        value = json.loads(content.decode("utf-8-sig"))
        if b"\\ud" in content or b"\\uD" in content:
            value = json.loads(json.dumps(value, ensure_ascii=False).encode(errors="replace"))
        return value
    except UnicodeDecodeError as error:
        raise ValueError(f"is not UTF-8 (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except RecursionError:
        raise ValueError("is not accepted: its values are nested too deeply") from None


def to_json(value: Any, *, indent: int | None = None) -> str:
    """Serialize to strict JSON; NaN and infinities become the strings of NONFINITE."""
    return json.dumps(to_plain(value), indent=indent, ensure_ascii=False, allow_nan=False)


def to_plain(value: Any) -> Any:
    """Convert to dicts, lists, strings, numbers and None; array scalars become numbers."""
    match value:
        case None | bool() | int() | str():
            return value
        case Enum():
            return to_plain(value.value)
        case Mapping():
            return {str(key): to_plain(item) for key, item in value.items()}
        case PurePath():
            return str(value)
        case SupportsFloat():
            return _number(float(value))
        case Iterable():
            return [to_plain(item) for item in value]
    raise TypeError(f"{type(value).__name__} cannot be stored as JSON: {value!r}")


def _number(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def from_number(value: Any) -> Any:
    """Inverse of `to_json` for a number: parses the strings of NONFINITE."""
    return float(value) if value in NONFINITE else value


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


Values = dict[str, Any]


class NewerFormatError(ValueError):
    """A file was written by a later version of maxhydra; the message names the format and what to install."""


def stamp(current: int) -> Values:
    """The entries that a file of format `current` carries."""
    return {"format": current, "maxhydra": maxhydra.__version__}


def migrate_format(
    values: Mapping[str, Any], *, current: int, migrations: Mapping[int, Callable[[Values], Values]]
) -> Values:
    """Bring a file's values to the `current` format: `migrations[n]` converts format n to n + 1.

    Raises NewerFormatError for a format above `current`, and ValueError if `format` is not a positive integer.
    """
    found = values.get("format", 1)
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(f"format={found!r} is not a positive integer")
    if found > current:
        writer = values.get("maxhydra", "a later version")
        raise NewerFormatError(
            f"has format {found}, written by maxhydra {writer}; maxhydra {maxhydra.__version__} reads formats up to "
            f"{current}: install maxhydra {writer} or later"
        )
    migrated = dict(values)
    for version in range(found, current):
        migrated = migrations[version](migrated) if version in migrations else migrated
    return migrated
