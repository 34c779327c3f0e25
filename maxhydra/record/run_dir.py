"""The run folder outputs/<run>/, and run.json, which records the status and provenance of the run."""

import contextlib
import copy
import datetime
import itertools
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import (
    NewerFormatError,
    acquire_lock,
    is_lost,
    process_start,
    replace_file,
    stamp,
    to_json,
    to_plain,
)
from maxhydra.record.facts import DAMAGED, FACTS, RUN_FORMAT, Facts, free_name, parse_facts, rebuild_facts
from maxhydra.record.labels import LABELS, apply_labels, change_labels, read_labels
from maxhydra.record.provenance import environment
from maxhydra.record.redact import redact_facts, redact_text

log = logging.getLogger("maxhydra")

# Facts stored per session and, with the latest value, for the whole run.
SESSION_FACTS = ("devices", "start_step", "end_step")
# Facts that a session is compared with when the run resumes.
INPUT_FACTS = ("inputs", "sequences_per_step")
STATUSES = ("running", "finished", "failed", "preempted", "pruned")
LOCK = ".lock"
# Minimum interval between writes of `heartbeat`.
HEARTBEAT_SECONDS = 15
LOST_REASON = "its process ended without reporting a status"


class RunInUseError(RuntimeError):
    """Another process is writing this run."""


class RunDirectory:
    """One run on disk. With `writes=False` (all processes except the first) it only provides paths and reads."""

    def __init__(self, path: Path | str, *, writes: bool = True):
        self.path = Path(path)
        self.writes = writes
        self._facts: Facts = {}
        self._earlier_inputs: Facts = {}
        self._earlier_config: bytes | None = None
        self._lock: int | None = None
        self._is_open = self._has_new_parent = False
        self._last_write = self.session_start = 0.0

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def config_path(self) -> Path:
        return self.path / "config.yaml"

    @property
    def log_path(self) -> Path:
        return self.path / "log.txt"

    @property
    def report_path(self) -> Path:
        return self.path / "report.html"

    @property
    def facts_path(self) -> Path:
        return self.path / "run.json"

    def exists(self) -> bool:
        return self.facts_path.exists()

    @contextlib.contextmanager
    def session(self, config_yaml: str, facts: Mapping[str, Any]) -> Iterator["RunDirectory"]:
        """Start a session whose end is always recorded: an exception inside marks the run as failed."""
        self.start(config_yaml, facts)
        try:
            yield self
        except BaseException as error:
            if self._is_open:
                # The error may be a full disk; a second error must not hide it.
                with contextlib.suppress(OSError):
                    self.finish("failed", f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def start(self, config_yaml: str, facts: Mapping[str, Any]) -> None:
        """Open a session of a new or existing run. Raises RunInUseError if another process is writing it.

        `environment()` is recorded here; `facts` adds what only the caller knows (name, task, choices, devices, ...).
        """
        if not self.writes:
            return
        self._has_new_parent = not self.path.parent.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._acquire_lock()
        previous = self._previous_facts()
        earlier = [_close_lost(session, previous) for session in previous.get("sessions", [])]
        known = {**environment(), **redact_facts(to_plain(facts))}
        git = self._store_diff(known.pop("git"), known.pop("diff"), number=len(earlier) + 1)
        self._earlier_inputs = {name: previous[name] for name in INPUT_FACTS if name in previous}
        self._replace_config(config_yaml, number=len(earlier) + 1)
        now = _now()
        session = {
            "started": now,
            "ended": None,
            "status": "running",
            "reason": None,
            "command": known["command"],
            "host": known["host"],
            "pid": known.pop("pid"),
            "pid_started": process_start(os.getpid()),
            "git": git,
            **dict.fromkeys(SESSION_FACTS),
            "spent": {},
        }
        state = {"status": "running", "reason": None, "created": previous.get("created", now), "finished": None}
        leading = {**stamp(RUN_FORMAT), "name": self.path.name, "task": None, **state}
        own = {**stamp(RUN_FORMAT), "git": git, **state, "sessions": [*earlier, session]}
        self._facts = {**leading, **previous, **known, **own}
        self.session_start = time.monotonic()
        self._is_open = True
        self.update(**{name: known[name] for name in SESSION_FACTS if name in known})

    def update(self, **facts: Any) -> None:
        """Add facts and rewrite run.json; a mapping is merged into an existing one."""
        if self.writes:
            self._merge(facts)
            self._save()

    def heartbeat(self, **facts: Any) -> None:
        """Like `update`, but rate-limited; a failed write is logged as a warning and does not stop the run."""
        if not self.writes:
            return
        self._merge(facts)
        if time.monotonic() - self._last_write >= HEARTBEAT_SECONDS:
            try:
                self._save()
            except OSError as error:
                log.warning("%s is out of date: %s", self.facts_path, error)
                self._last_write = time.monotonic()

    def finish(self, status: str, reason: str | None = None, **facts: Any) -> None:
        """Close the session with a status (finished, failed, preempted, pruned) and a reason."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r}, accepted: {', '.join(STATUSES)}")
        if not self.writes:
            return
        now, clean_reason = _now(), None if reason is None else redact_text(reason)
        seconds = round(time.monotonic() - self.session_start, 3)
        sessions: list[Facts] = self._facts["sessions"]
        sessions[-1].update(ended=now, status=status, reason=clean_reason, seconds=seconds)
        self._facts.update(status=status, reason=clean_reason, finished=now)
        total = round(sum(session["seconds"] for session in sessions), 3)
        self._merge({**facts, "timings": {**facts.get("timings", {}), "total": total}})
        self._save()
        self._is_open = False
        self._release_lock()

    def fail(self, reason: str) -> None:
        """Close the session as failed from any process; one that does not write the run waits until the writer ended.

        The first of several processes that call this records its reason.
        """
        if self.writes:
            self.finish("failed", reason)
            return
        survivor = RunDirectory(self.path)
        survivor._acquire_lock()
        try:
            facts = parse_facts(survivor.facts_path.read_bytes())
            if facts["status"] == "running":
                survivor._facts = facts
                survivor.session_start = time.monotonic() - _age(facts["sessions"][-1]["started"])
                survivor.finish("failed", reason)
        finally:
            survivor._release_lock()

    def mark_pruned(self, reason: str) -> None:
        """Record that a sweep has stopped this run, whose process has ended, in run.json and in the log."""
        self._acquire_lock()
        try:
            self._facts = parse_facts(self.facts_path.read_bytes())
            outcome = {"status": "pruned", "reason": redact_text(reason)}
            self._facts.update(outcome)
            self._facts["sessions"][-1].update(outcome)
            self._save()
            with open(self.log_path, "a", encoding="utf-8") as file:
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} INFO {outcome['reason']}\n")
        finally:
            self._release_lock()

    def withdraw(self, reason: str) -> None:
        """Undo a session that could not start: remove the folder of a new run, or close a resumed one as failed."""
        if not self.writes:
            return
        has_steps = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        if len(self._facts["sessions"]) > 1 or has_steps:
            # A session that never trained does not change what the run is compared with when it resumes.
            self._facts.update(self._earlier_inputs)
            if self._earlier_config is not None:
                self.config_path.write_bytes(self._earlier_config)
            self.finish("failed", reason)
            return
        self._is_open = False
        self._release_lock()
        for name in ("run.json", "config.yaml", "log.txt", "diff.patch", "metrics.jsonl", LOCK):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()
            if self._has_new_parent:
                self.path.parent.rmdir()

    def read(self) -> Facts:
        """Facts of run.json and labels.json, with status `lost` for a run whose process is gone.

        Unreadable labels are ignored with a warning, since the run's status does not depend on them.
        """
        facts = self._read_facts()
        try:
            return apply_labels(facts, read_labels(self.path))
        except (ValueError, OSError) as error:
            log.warning("%s is ignored: %s", self.path / LABELS, error)
            return apply_labels(facts, {})

    def label(self, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> None:
        """Change tags and note, at any time and from any process; see labels.py."""
        change_labels(self.path, add=add, remove=remove, note=note)

    def remove(self) -> None:
        """Delete the folder. Raises RunInUseError if another process is writing it.

        The folder is renamed first, atomically, so that a kill midway leaves nothing that looks like a run.
        """
        self._acquire_lock()
        hidden = self.path.with_name(f".removed-{self.path.name}-{os.getpid()}")
        self.path.rename(hidden)
        self._release_lock()
        shutil.rmtree(hidden)

    def remove_checkpoints(self) -> None:
        """Delete only the checkpoints, in the same way."""
        self._acquire_lock()
        try:
            hidden = self.path / ".removed-checkpoints"
            if hidden.exists():
                shutil.rmtree(hidden)
            if self.checkpoints.is_dir():
                self.checkpoints.rename(hidden)
                shutil.rmtree(hidden)
        finally:
            self._release_lock()

    def _previous_facts(self) -> Facts:
        """Facts of the earlier sessions; empty for a new run. A damaged run.json is kept as a copy."""
        if self.exists():
            try:
                parse_facts(self.facts_path.read_bytes())
            except NewerFormatError:
                raise
            except ValueError as error:
                os.replace(self.facts_path, self.path / DAMAGED)
                log.warning("%s %s; it is kept as %s, and the run resumes without it", self.facts_path, error, DAMAGED)
                return rebuild_facts(self.path, f"{FACTS} {error}")
            return self._read_facts()
        if self.checkpoints.is_dir() and any(self.checkpoints.iterdir()):
            log.warning("%s has checkpoints, but no %s; the run resumes without it", self.path, FACTS)
            return rebuild_facts(self.path, f"{FACTS} was missing")
        return {}

    def _read_facts(self) -> Facts:
        """Facts of run.json. A damaged file is rebuilt in memory from the other files."""
        try:
            facts = parse_facts(self.facts_path.read_bytes())
        except NewerFormatError:
            raise
        except ValueError as error:
            return rebuild_facts(self.path, f"{FACTS} {error}")
        if facts["status"] == "running" and is_lost(facts["sessions"][-1], facts["updated"]):
            facts.update(status="lost", reason=LOST_REASON)
        return facts

    def _merge(self, facts: Mapping[str, Any]) -> None:
        for name, value in redact_facts(to_plain(facts)).items():
            if name == "spent":  # seconds by activity, for the goodput
                self._facts["sessions"][-1][name].update(value)
                continue
            if name in SESSION_FACTS:
                self._facts["sessions"][-1][name] = value
            known = self._facts.get(name)
            self._facts[name] = {**known, **value} if isinstance(value, dict) and isinstance(known, dict) else value

    def _save(self) -> None:
        self._facts["updated"] = _now()
        replace_file(self.facts_path, to_json(self._facts, indent=2) + "\n")
        self._last_write = time.monotonic()

    def _store_diff(self, git: Facts | None, diff: str, number: int) -> Facts | None:
        """Store uncommitted changes in a separate file, one per session."""
        if git is None or not diff:
            return git
        name = "diff.patch" if number == 1 else free_name(self.path, "diff.{}.patch", itertools.count(number))
        replace_file(self.path / name, diff + "\n")
        return {**git, "diff": name}

    def _replace_config(self, config_yaml: str, number: int) -> None:
        """Write this session's config.yaml; a different earlier one is kept as config.<session>.yaml."""
        if self.config_path.exists():
            if self.config_path.read_bytes() == config_yaml.encode():
                return
            # Copied as bytes: a damaged file is kept too.
            self._earlier_config = self.config_path.read_bytes()
            name = free_name(self.path, "config.{}.yaml", itertools.count(number - 1))
            shutil.copyfile(self.config_path, self.path / name)
        replace_file(self.config_path, config_yaml)

    def _acquire_lock(self) -> None:
        try:
            self._lock = acquire_lock(self.path / LOCK)
        except BlockingIOError:
            holder = self._read_facts()["sessions"][-1] if self.exists() else {}
            owner = f" (process {holder['pid']} on {holder['host']})" if holder.get("pid") else ""
            raise RunInUseError(f"{self.path} is being written by another process{owner}") from None

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _close_lost(session: Facts, run: Facts) -> Facts:
    """Return an earlier session unchanged, or closed as lost at the last `updated` time if it has no end."""

    if session["status"] != "running":
        return session
    closed = copy.deepcopy(session)
    closed.update(status="lost", ended=run["updated"], reason=LOST_REASON)
    closed["seconds"] = (_parse(run["updated"]) - _parse(session["started"])).total_seconds()
    return closed


def _age(moment: str) -> float:
    return (datetime.datetime.now(datetime.UTC) - _parse(moment)).total_seconds()


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse(moment: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(moment)
