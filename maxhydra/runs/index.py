"""outputs/.runs.sqlite: an index of all runs, so that the files of ten thousand runs are not read each time.

The files are the source of truth. Changed files are read again before each use; an index that is missing, damaged or
has a different version is rebuilt, and one that cannot be written is kept in memory.
"""

import contextlib
import functools
import json
import multiprocessing
import os
import sqlite3
from array import array
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from maxhydra.record.redact import redact_facts, redact_value
from maxhydra.runs import settings as run_settings
from maxhydra.runs.scan import (
    INCOMPLETE_LINE,
    METRICS,
    FileStamp,
    MetricSummary,
    Position,
    find_runs,
    read_facts,
    read_metric_summaries,
    read_settings,
    tail,
)
from maxhydra.runs.summary import Facts, wall_seconds

T = TypeVar("T")

FILE = ".runs.sqlite"
# Version of the tables below and their contents.
VERSION = 5
# Lock timeout: another process may be building the index of very many runs.
BUSY_SECONDS = 300
# Number of changed runs from which worker processes pay off, and runs per task of a worker.
PARALLEL_RUNS, CHUNK = 1000, 50

_TABLES = """
-- `change` grows with every refresh that found changes; `epoch` identifies this database file.
CREATE TABLE counter (epoch TEXT, change INTEGER);
INSERT INTO counter VALUES (hex(randomblob(8)), 0);
CREATE TABLE run (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE, facts_stamp TEXT, metrics_stamp TEXT, change INTEGER,
  inode INTEGER, offset INTEGER, lines INTEGER, tail TEXT, step INTEGER, faults TEXT, metrics_faults TEXT, entry TEXT,
  settings BLOB);
-- Every distinct (key, value) pair of any run; `run.settings` holds the packed ids of a run's pairs.
CREATE TABLE setting (id INTEGER PRIMARY KEY, key TEXT, value, UNIQUE (key, value));
CREATE TABLE metric (
  name TEXT, run INTEGER, step INTEGER, last REAL, low REAL, low_step INTEGER, high REAL, high_step INTEGER,
  PRIMARY KEY (name, run)) WITHOUT ROWID;
CREATE INDEX metric_of_run ON metric (run);
"""


class IndexEntry(NamedTuple):
    """Stored state of a run's files."""

    id: int
    stamp: FileStamp
    position: Position


class Index:
    """The index tables, updated by `refresh`. One connection, used by one thread at a time."""

    def __init__(self, root: Path):
        self.root = root
        self._file = root / FILE
        self._settings: dict[tuple[str, run_settings.Cell], int] = {}
        self._connection = self._open()

    def refresh(self) -> None:
        """Read the files that changed on disk."""
        self._with_recovery(self._refresh)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """Rows of a query."""
        return self._with_recovery(lambda: self._connection.execute(query, values).fetchall())

    def close(self) -> None:
        self._connection.close()

    def _with_recovery(self, action: Callable[[], T]) -> T:
        """Run an action; rebuild a damaged index, then fall back to memory (e.g. on file systems without locks)."""
        for recover in (self._rebuild, self._move_to_memory):
            try:
                return action()
            except sqlite3.DatabaseError:
                recover()
        return action()

    def _open(self) -> sqlite3.Connection:
        if os.access(self.root, os.W_OK):
            for _ in range(2):  # The existing file, then a new one.
                with contextlib.suppress(sqlite3.DatabaseError):
                    return _connect(str(self._file))
                self._delete()
        return _connect(":memory:")

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            for path in (self._file, self._file.with_name(f"{FILE}-journal")):
                path.unlink(missing_ok=True)

    def _rebuild(self) -> None:
        self._connection.close()
        self._settings.clear()
        self._delete()
        self._connection = self._open()
        try:
            self._refresh()
        except sqlite3.DatabaseError:
            self._move_to_memory()

    def _move_to_memory(self) -> None:
        self._connection.close()
        self._settings.clear()
        self._connection = _connect(":memory:")
        self._refresh()

    def _refresh(self) -> None:
        columns = "path, id, facts_stamp, metrics_stamp, inode, offset, lines, tail"
        rows = self._connection.execute(f"SELECT {columns} FROM run")
        known = {
            path: IndexEntry(id, FileStamp(facts, metrics), Position(*rest)) for path, id, facts, metrics, *rest in rows
        }
        stamps = dict(find_runs(self.root))
        gone = [known[path].id for path in known.keys() - stamps.keys()]
        changed = [path for path, stamp in stamps.items() if path not in known or known[path].stamp != stamp]
        if not gone and not changed:
            return
        positions = [self._position(path, known.get(path), stamps[path]) for path in changed]
        with self._transaction() as change, _parallel_map(len(changed)) as map_runs:
            for id in gone:
                self._remove(id)
            folders = [self.root / path for path in changed]
            for path, since, result in zip(
                changed, positions, map_runs(read_metric_summaries, folders, positions), strict=True
            ):
                id = self._store_run(path, stamps[path], known.get(path), change)
                self._store_metrics(id, since, *result)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[int]:
        """One transaction; yields the change number of its updates."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            (change,) = self._connection.execute("UPDATE counter SET change = change + 1 RETURNING change").fetchone()
            yield change
        except BaseException:
            self._settings.clear()
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _store_run(self, path: str, stamp: FileStamp, known: IndexEntry | None, change: int) -> int:
        (id,) = self._connection.execute(
            "INSERT INTO run (path, facts_stamp, metrics_stamp, change) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (path) DO UPDATE SET facts_stamp = excluded.facts_stamp, "
            "metrics_stamp = excluded.metrics_stamp, change = excluded.change RETURNING id",
            (path, stamp.facts, stamp.metrics, change),
        ).fetchone()
        if known is None or known.stamp.facts != stamp.facts:
            self._store_facts(id, self.root / path)
        return int(id)

    def _store_facts(self, id: int, folder: Path) -> None:
        errors: list[str] = []
        facts = read_facts(folder, errors)
        settings = [] if facts is None else read_settings(folder, facts, errors)
        entry = None if facts is None else json.dumps(_entry(redact_facts(facts)))
        self._connection.execute(
            "UPDATE run SET faults = ?, entry = ?, settings = ? WHERE id = ?",
            (json.dumps(errors), entry, pack(self._setting_id(setting) for setting in settings), id),
        )

    def _setting_id(self, setting: tuple[str, run_settings.Cell]) -> int:
        """Id of a (key, value) pair, inserted into the table when first seen."""
        setting_id = self._settings.get(setting)
        if setting_id is None:
            key, value = setting
            # Runs of earlier versions may have stored secrets. Done once per distinct pair.
            stored = (key, redact_value(key, value) if isinstance(value, str) else value)
            row = self._connection.execute("SELECT id FROM setting WHERE key = ? AND value = ?", stored).fetchone()
            if row is None:
                row = (self._connection.execute("INSERT INTO setting (key, value) VALUES (?, ?)", stored).lastrowid,)
            setting_id = self._settings[setting] = int(row[0])
        return setting_id

    def _position(self, path: str, known: IndexEntry | None, stamp: FileStamp) -> Position:
        """Where to continue reading: the last position if the file only grew, the start if it was replaced."""
        since = known.position if known is not None else Position()
        inode, size, _ = (stamp.metrics or "0:0:0").split(":")
        has_grown = int(inode) == since.inode and int(size) >= since.offset
        return since if has_grown and tail(self.root / path / METRICS, since.offset) == since.tail else Position()

    def _store_metrics(
        self, id: int, since: Position, now: Position, traces: dict[str, MetricSummary], errors: list[str]
    ) -> None:
        if since.offset:
            columns = "name, step, last, low, low_step, high, high_step"
            rows = self._connection.execute(f"SELECT {columns} FROM metric WHERE run = ?", (id,))
            for name, *earlier in rows.fetchall():
                stored = MetricSummary(*earlier)
                traces[name] = stored.merge(traces[name]) if name in traces else stored
            ((before,),) = self._connection.execute("SELECT metrics_faults FROM run WHERE id = ?", (id,))
            errors = [*(error for error in json.loads(before or "[]") if INCOMPLETE_LINE not in error), *errors]
        self._connection.execute("DELETE FROM metric WHERE run = ?", (id,))
        self._connection.executemany(
            "INSERT INTO metric VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(name, id, t.step, t.last, t.low, t.low_step, t.high, t.high_step) for name, t in traces.items()],
        )
        step = max((trace.step for trace in traces.values()), default=None)
        self._connection.execute(
            "UPDATE run SET inode = ?, offset = ?, lines = ?, tail = ?, step = ?, metrics_faults = ? WHERE id = ?",
            (*now, step, json.dumps(errors), id),
        )

    def _remove(self, id: int) -> None:
        self._connection.execute("DELETE FROM metric WHERE run = ?", (id,))
        self._connection.execute("DELETE FROM run WHERE id = ?", (id,))


@contextlib.contextmanager
def _parallel_map(count: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, with worker processes for many items: nearly all of the time is spent parsing."""
    if count < PARALLEL_RUNS:
        yield map
        return
    # Spawned instead of forked, because the server has threads.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield functools.partial(pool.map, chunksize=CHUNK)


def pack(numbers: Iterable[int]) -> bytes:
    """Pack as 32-bit integers."""
    return array("I", numbers).tobytes()


def unpack(packed: bytes) -> "array[int]":
    return array("I", packed)


def _connect(file: str) -> sqlite3.Connection:
    """Open a database and create missing tables. Raises DatabaseError if it is not an index of this version."""
    # The server queries from several threads, one at a time.
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        # The file can be rebuilt, so durability is not needed.
        connection.execute("PRAGMA synchronous = OFF")
        # 64 MB: the tables of ten thousand runs fit, so that pages are not written while the index is built.
        connection.execute("PRAGMA cache_size = -65536")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            if version or connection.execute("SELECT name FROM sqlite_master").fetchone():
                raise sqlite3.DatabaseError("not an index of this version")
            connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _entry(facts: Facts) -> dict[str, Any]:
    """Fields shown for every run; the others are read from run.json on demand."""
    session, objective, git = facts["sessions"][-1], facts.get("objective") or {}, facts.get("git") or {}
    return {
        "name": str(facts.get("name")),
        "task": facts.get("task"),
        "model": (facts.get("choices") or {}).get("model"),
        "status": str(facts["status"]),
        "reason": facts.get("reason"),
        "created": facts["created"],
        "updated": facts["updated"],
        "seconds": round(wall_seconds(facts), 1),
        "objective": objective.get("name"),
        "value": objective.get("value"),
        "devices": facts.get("devices"),
        "commit": git.get("sha"),
        "dirty": bool(git.get("dirty")),
        "tags": facts["tags"],
        "notes": facts.get("notes") or "",
        "session": {name: session[name] for name in ("host", "pid", "pid_started")},
    }
