"""outputs/<run>/: where everything about a run lies, and run.json, which tells what became of it."""

import contextlib
import copy
import datetime
import json
import logging
import os
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import plain, replace_file, to_json
from maxhydra.record.labels import LABELS, change_labels, labelled, read_labels
from maxhydra.record.liveness import is_lost, process_start
from maxhydra.record.lock import take_lock
from maxhydra.record.provenance import environment
from maxhydra.record.redact import scrub_text

log = logging.getLogger("maxhydra")

Facts = dict[str, Any]

# Facts that belong to a session as well as to the run as a whole, which shows the latest.
SESSION_FACTS = ("devices", "start_step", "end_step")
STATUSES = ("running", "finished", "failed", "preempted")
LOCK = ".lock"
# `heartbeat` writes no more often than this.
HEARTBEAT_SECONDS = 15
LOST_REASON = "its process ended without a word"


class RunInUseError(RuntimeError):
    """Another process is writing this run."""


class RunDirectory:
    """One run on disk. With `writes=False` (every process but the first) it names the files and changes none."""

    def __init__(self, path: Path | str, *, writes: bool = True):
        self.path = Path(path)
        self.writes = writes
        self._facts: Facts = {}
        self._lock: int | None = None
        self._is_open = False
        self._last_write = self._session_start = 0.0

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
        """`start`, and a promise that run.json says how it ended: what is raised inside makes the run failed."""
        self.start(config_yaml, facts)
        try:
            yield self
        except BaseException as error:
            if self._is_open:
                # A full disk may be what was raised; it must not hide behind a second error.
                with contextlib.suppress(OSError):
                    self.finish("failed", f"{type(error).__name__}: {error}".rstrip(": "))
            raise

    def start(self, config_yaml: str, facts: Mapping[str, Any]) -> None:
        """Open a session: create the run, or add to the one that is there. Raises RunInUseError if it is being written.

        `environment()` is recorded here; `facts` adds what only the caller knows (name, task, choices, devices, ...).
        """
        if not self.writes:
            return
        self.path.mkdir(parents=True, exist_ok=True)
        self._take_lock()
        previous = self._stored() if self.exists() else {}
        earlier = [_closed(session, previous) for session in previous.get("sessions", [])]
        known = {**environment(), **plain(facts)}
        git = self._keep_diff(known.pop("git"), known.pop("diff"), number=len(earlier) + 1)
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
        }
        state = {"status": "running", "reason": None, "created": previous.get("created", now), "finished": None}
        leading = {"name": self.path.name, "task": None, **state}
        self._facts = {**leading, **previous, **known, "git": git, **state, "sessions": [*earlier, session]}
        self._session_start = time.monotonic()
        self._is_open = True
        self.update(**{name: known[name] for name in SESSION_FACTS if name in known})

    def update(self, **facts: Any) -> None:
        """Add facts and rewrite run.json; a fact that is a mapping adds its keys to those already there."""
        if self.writes:
            self._merge(facts)
            self._save()

    def heartbeat(self, **facts: Any) -> None:
        """The same, written only now and then; where it cannot be written the run is warned and goes on."""
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
        """Close the session: finished, failed or preempted, and why."""
        if status not in STATUSES:
            raise ValueError(f"status={status!r}, accepted: {', '.join(STATUSES)}")
        if not self.writes:
            return
        now, why = _now(), None if reason is None else scrub_text(reason)
        seconds = round(time.monotonic() - self._session_start, 3)
        sessions: list[Facts] = self._facts["sessions"]
        sessions[-1].update(ended=now, status=status, reason=why, seconds=seconds)
        self._facts.update(status=status, reason=why, finished=now)
        total = round(sum(session["seconds"] for session in sessions), 3)
        self._merge({**facts, "timings": {**facts.get("timings", {}), "total": total}})
        self._save()
        self._is_open = False
        self._release_lock()

    def withdraw(self, reason: str) -> None:
        """The session could not begin: take a new run's folder away; one that has got anywhere is closed as failed."""
        if not self.writes:
            return
        has_steps = self.metrics_path.exists() and self.metrics_path.stat().st_size > 0
        if len(self._facts["sessions"]) > 1 or has_steps:
            self.finish("failed", reason)
            return
        self._is_open = False
        self._release_lock()
        for name in ("run.json", "config.yaml", "log.txt", "diff.patch", "metrics.jsonl", LOCK):
            (self.path / name).unlink(missing_ok=True)
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def read(self) -> Facts:
        """What run.json and labels.json say, with status `lost` for a run whose process is gone.

        Labels that cannot be read are left out: what became of the run does not depend on them.
        """
        facts = self._stored()
        try:
            return labelled(facts, read_labels(self.path))
        except ValueError as error:
            log.warning("%s is left out: %s", self.path / LABELS, error)
            return labelled(facts, {})

    def label(self, *, add: Iterable[str] = (), remove: Iterable[str] = (), note: str | None = None) -> None:
        """Tags and a note, at any time and from any process; see labels.py."""
        change_labels(self.path, add=add, remove=remove, note=note)

    def remove(self) -> None:
        """Take the whole folder away. Raises RunInUseError if it is being written.

        It is hidden first, in one step: a kill midway leaves nothing that looks like a run.
        """
        self._take_lock()
        hidden = self.path.with_name(f".removed-{self.path.name}-{os.getpid()}")
        self.path.rename(hidden)
        self._release_lock()
        shutil.rmtree(hidden)

    def remove_checkpoints(self) -> None:
        """Take the checkpoints alone away, in the same manner."""
        self._take_lock()
        try:
            hidden = self.path / ".removed-checkpoints"
            if hidden.exists():
                shutil.rmtree(hidden)
            if self.checkpoints.is_dir():
                self.checkpoints.rename(hidden)
                shutil.rmtree(hidden)
        finally:
            self._release_lock()

    def _stored(self) -> Facts:
        facts: Facts = json.loads(self.facts_path.read_text(encoding="utf-8"))
        if facts["status"] == "running" and is_lost(facts["sessions"][-1], facts["updated"]):
            facts.update(status="lost", reason=LOST_REASON)
        return facts

    def _merge(self, facts: Mapping[str, Any]) -> None:
        for name, value in plain(facts).items():
            if name in SESSION_FACTS:
                self._facts["sessions"][-1][name] = value
            known = self._facts.get(name)
            self._facts[name] = {**known, **value} if isinstance(value, dict) and isinstance(known, dict) else value

    def _save(self) -> None:
        self._facts["updated"] = _now()
        replace_file(self.facts_path, to_json(self._facts, indent=2) + "\n")
        self._last_write = time.monotonic()

    def _keep_diff(self, git: Facts | None, diff: str, number: int) -> Facts | None:
        """Uncommitted changes go to a file of their own, one per session."""
        if git is None or not diff:
            return git
        name = "diff.patch" if number == 1 else f"diff.{number}.patch"
        replace_file(self.path / name, diff + "\n")
        return {**git, "diff": name}

    def _replace_config(self, config_yaml: str, number: int) -> None:
        """config.yaml is this session's; one that differed is kept under the number of the session that it served."""
        if self.config_path.exists():
            before = self.config_path.read_text(encoding="utf-8")
            if before == config_yaml:
                return
            replace_file(self.path / f"config.{number - 1}.yaml", before)
        replace_file(self.config_path, config_yaml)

    def _take_lock(self) -> None:
        try:
            self._lock = take_lock(self.path / LOCK)
        except BlockingIOError:
            holder = self._stored()["sessions"][-1] if self.exists() else {}
            where = f" (process {holder['pid']} on {holder['host']})" if holder else ""
            raise RunInUseError(f"{self.path} is being written by another process{where}") from None

    def _release_lock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _closed(session: Facts, run: Facts) -> Facts:
    """An earlier session as history: one that never said how it ended was lost, last heard of at `updated`."""
    if session["status"] != "running":
        return session
    closed = copy.deepcopy(session)
    closed.update(status="lost", ended=run["updated"], reason=LOST_REASON)
    closed["seconds"] = (_parse(run["updated"]) - _parse(session["started"])).total_seconds()
    return closed


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _parse(moment: str) -> datetime.datetime:
    return datetime.datetime.fromisoformat(moment)
