"""The facts in run.json: checked when they are read, and rebuilt from the run's other files if run.json is damaged.

A file system can lose the content of a file that was complete when it was written, after a power failure or in a copy
that was interrupted. The weights and metrics of such a run are intact, so it stays visible and can be resumed.
"""

import datetime
import math
import re
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import NONFINITE, is_lost, migrate_format, parse_json
from maxhydra.record.metrics import scan_metrics

Facts = dict[str, Any]

# Format of run.json. 1: without `format`. 2: with `format`.
RUN_FORMAT = 2

FACTS, DAMAGED = "run.json", "run.json.damaged"
# Default folder of runs (run.outputs), and the plan in the folder of a sweep.
DEFAULT_OUTPUTS, SWEEP_FILE = "outputs", "sweep.json"
# The folder of profiles, its file of op_names by operation, and the event around each step in a trace.
PROFILES, OPERATIONS, STEP_EVENT = "profile", "operations.json", "train"
# Statistics of layers, one line per recorded step in the format of metrics.jsonl.
STATISTICS = "statistics.jsonl"
# Optional facts by the type that readers expect; null is accepted for all.
_OBJECTS = ("objective", "git", "choices", "timings", "packages", "variables", "metrics")
_TEXTS = ("name", "task", "reason", "notes", "host", "sample", "config_dir")
_LISTS_OF_TEXT = ("tags", "command", "overrides")
_TASK = re.compile(r"^task:\n(?:  .*\n)*?  name: (\w+)$", re.MULTILINE)


def parse_facts(content: bytes) -> Facts:
    """Parse run.json and bring it to the current format. Everything that a listing or report relies on is checked.

    Raises NewerFormatError if a later version wrote it, and any other ValueError if it is damaged.
    """
    facts = parse_json(content)
    if not isinstance(facts, dict):
        raise ValueError("is not a JSON object")
    facts = migrate_format(facts, current=RUN_FORMAT, migrations={})
    try:
        _require(isinstance(facts["status"], str), "status")
        for name in ("created", "updated"):
            _require(isinstance(facts[name], str), name)
            _time(facts[name])
        _require(isinstance(facts["sessions"], list) and facts["sessions"], "sessions")
        for session in facts["sessions"]:
            _check_session(session)
        is_lost(facts["sessions"][-1], facts["updated"])
    except KeyError as error:
        raise ValueError(f"has no {error.args[0]!r}") from None
    except (TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"is damaged ({error})") from None
    _check_optional(facts)
    return facts


def _check_session(session: Any) -> None:
    _require(isinstance(session, dict), "sessions")
    _require(isinstance(session["started"], str), "started")
    _time(session["started"])
    _time(session.get("ended"))
    # The copy of a run on a cluster has neither host nor process.
    _require(isinstance(session["status"], str) and isinstance(session["host"], str | None), "sessions")
    pid = session["pid"]
    _require(pid is None or (isinstance(pid, int) and 0 <= pid < 2**31), "pid")
    _require(isinstance(session["pid_started"], str | None), "pid_started")
    _require(_is_number(session.get("seconds")), "seconds")
    spent = session.get("spent") or {}
    _require(isinstance(spent, dict) and all(map(_is_number, spent.values())), "spent")
    for name in ("start_step", "end_step"):
        _require(isinstance(session.get(name), int | None), name)
    _require(isinstance(session.get("git"), dict | None) and _has_texts(session.get("git")), "git")
    _require(isinstance(session.get("reason"), str | None), "reason")


def _check_optional(facts: Facts) -> None:
    for name in _OBJECTS:
        _require(isinstance(facts.get(name), dict | None), name, "an object")
    for name in _TEXTS:
        _require(isinstance(facts.get(name), str | None), name, "a text")
    for name in _LISTS_OF_TEXT:
        items = facts.get(name)
        _require(items is None or (isinstance(items, list) and all(isinstance(i, str) for i in items)), name, "a list")
    objective = facts.get("objective") or {}
    _require(isinstance(objective.get("name"), str | None), "objective")
    _require(_is_number(objective.get("value")) or objective["value"] in NONFINITE, "objective")
    _require(all(map(_is_number, (facts.get("timings") or {}).values())), "timings")
    _require(_is_number(facts.get("parameters")), "parameters")
    _require(_has_texts(facts.get("git")), "git")


def _has_texts(git: dict[str, Any] | None) -> bool:
    return all(isinstance((git or {}).get(name), str | None) for name in ("sha", "branch", "diff"))


def _is_number(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and math.isfinite(value))


def _require(is_valid: Any, name: str, kind: str = "") -> None:
    if not is_valid:
        raise ValueError(f"is damaged ({name} is not {kind})" if kind else f"is damaged ({name})")


def _time(text: str | None) -> None:
    """Require a time with a zone, or null."""
    _require(text is None or datetime.datetime.fromisoformat(text).tzinfo is not None, "a time without a zone")


def rebuild_facts(folder: Path, reason: str) -> Facts:
    """Facts of a run without a readable run.json, as one lost session: times of its files, last step, task."""
    files = [folder / name for name in ("config.yaml", "metrics.jsonl", "log.txt", "labels.json", FACTS)]
    moments = sorted(moment for path in files if (moment := _modified(path)) is not None) or [0.0]
    created, updated = (_format_time(moment) for moment in (moments[0], moments[-1]))
    session = {
        "started": created,
        "ended": updated,
        "status": "lost",
        "reason": reason,
        "seconds": round(moments[-1] - moments[0], 3),
        "command": [],
        "host": socket.gethostname(),
        "pid": 0,
        "pid_started": None,
        "git": None,
        "start_step": None,
        "end_step": _last_step(folder),
    }
    state = {"status": "lost", "reason": reason, "created": created, "updated": updated, "finished": updated}
    return {"name": folder.name, "task": _task(folder), **state, "host": session["host"], "sessions": [session]}


def free_name(folder: Path, pattern: str, numbers: Iterable[int]) -> str:
    """The first name of a numbered file that does not exist: rebuilt facts do not know how many sessions there were."""
    return next(name for name in (pattern.format(number) for number in numbers) if not (folder / name).exists())


def _modified(path: Path) -> float | None:
    try:
        return path.stat().st_mtime
    except OSError:
        return None


def _last_step(folder: Path) -> int | None:
    try:
        rows = scan_metrics(folder / "metrics.jsonl").rows
    except OSError:
        return None
    return int(rows[-1]["step"]) if rows else None


def _task(folder: Path) -> str | None:
    try:
        match = _TASK.search((folder / "config.yaml").read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return None
    return match[1] if match else None


def _format_time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
