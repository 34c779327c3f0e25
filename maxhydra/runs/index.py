"""outputs/.runs.sqlite: what the files of all runs say, kept so that ten thousand of them need not be read again.

The files are the truth. Whatever changed since is read anew before each use; an index that is gone, damaged or of
another version is made again, and one that cannot be written lives in memory.
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

from maxhydra.runs import config_sections
from maxhydra.runs.scan import (
    HALF,
    METRICS,
    FileStamp,
    MetricSummary,
    Position,
    find,
    read_facts,
    read_settings,
    read_traces,
    tail,
)
from maxhydra.runs.summary import Facts, wall_seconds

T = TypeVar("T")

FILE = ".runs.sqlite"
# Of the tables below and of what is put into them.
VERSION = 4
# Another process may be making the index of very many runs.
BUSY_SECONDS = 300
# From so many changed runs on, it pays to start processes that read them; each takes so many at a time.
MANY, CHUNK = 1000, 50

_TABLES = """
-- `change` grows with every refresh that found something; `epoch` tells this file from the one before it.
CREATE TABLE counter (epoch TEXT, change INTEGER);
INSERT INTO counter VALUES (hex(randomblob(8)), 0);
CREATE TABLE run (
  id INTEGER PRIMARY KEY, path TEXT UNIQUE, facts_stamp TEXT, metrics_stamp TEXT, change INTEGER,
  inode INTEGER, offset INTEGER, lines INTEGER, tail TEXT, step INTEGER, faults TEXT, metrics_faults TEXT, entry TEXT,
  settings BLOB);
-- Every key with every value that any run has had, once; `run.settings` holds the numbers of a run's own, packed.
CREATE TABLE setting (id INTEGER PRIMARY KEY, key TEXT, value, UNIQUE (key, value));
CREATE TABLE metric (
  name TEXT, run INTEGER, step INTEGER, last REAL, low REAL, low_step INTEGER, high REAL, high_step INTEGER,
  PRIMARY KEY (name, run)) WITHOUT ROWID;
CREATE INDEX metric_of_run ON metric (run);
"""


class IndexEntry(NamedTuple):
    """What the index remembers of a run's files."""

    id: int
    stamp: FileStamp
    position: Position


class Index:
    """The tables, brought up to date by `refresh`. One connection, for one thread at a time."""

    def __init__(self, root: Path):
        self.root = root
        self._file = root / FILE
        self._settings: dict[tuple[str, config_sections.Cell], int] = {}
        self._connection = self._open()

    def refresh(self) -> None:
        """Read what changed on disk."""
        self._surely(self._refresh)

    def rows(self, query: str, *values: Any) -> list[tuple[Any, ...]]:
        """What a query finds."""
        return self._surely(lambda: self._connection.execute(query, values).fetchall())

    def close(self) -> None:
        self._connection.close()

    def _surely(self, action: Callable[[], T]) -> T:
        """Do it; where the index is damaged, with a new one; where none can be kept (no locks there), in memory."""
        for recover in (self._start_over, self._move_to_memory):
            try:
                return action()
            except sqlite3.DatabaseError:
                recover()
        return action()

    def _open(self) -> sqlite3.Connection:
        if os.access(self.root, os.W_OK):
            for _ in ("as it is", "anew"):
                with contextlib.suppress(sqlite3.DatabaseError):
                    return _connect(str(self._file))
                self._delete()
        return _connect(":memory:")

    def _delete(self) -> None:
        with contextlib.suppress(OSError):
            for path in (self._file, self._file.with_name(f"{FILE}-journal")):
                path.unlink(missing_ok=True)

    def _start_over(self) -> None:
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
        found = dict(find(self.root))
        gone = [known[path].id for path in known.keys() - found.keys()]
        changed = [path for path, stamp in found.items() if path not in known or known[path].stamp != stamp]
        if not gone and not changed:
            return
        positions = [self._position(path, known.get(path), found[path]) for path in changed]
        with self._writing() as change, _mapping(len(changed)) as mapped:
            for id in gone:
                self._forget(id)
            folders = [self.root / path for path in changed]
            for path, since, read in zip(changed, positions, mapped(read_traces, folders, positions), strict=True):
                id = self._keep(path, found[path], known.get(path), change)
                self._keep_metrics(id, since, *read)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[int]:
        """One transaction; gives the number by which its changes are told from earlier ones."""
        self._connection.execute("BEGIN IMMEDIATE")
        try:
            (change,) = self._connection.execute("UPDATE counter SET change = change + 1 RETURNING change").fetchone()
            yield change
        except BaseException:
            self._settings.clear()
            self._connection.execute("ROLLBACK")
            raise
        self._connection.execute("COMMIT")

    def _keep(self, path: str, stamp: FileStamp, known: IndexEntry | None, change: int) -> int:
        (id,) = self._connection.execute(
            "INSERT INTO run (path, facts_stamp, metrics_stamp, change) VALUES (?, ?, ?, ?) "
            "ON CONFLICT (path) DO UPDATE SET facts_stamp = excluded.facts_stamp, "
            "metrics_stamp = excluded.metrics_stamp, change = excluded.change RETURNING id",
            (path, stamp.facts, stamp.metrics, change),
        ).fetchone()
        if known is None or known.stamp.facts != stamp.facts:
            self._keep_facts(id, self.root / path)
        return int(id)

    def _keep_facts(self, id: int, folder: Path) -> None:
        faults: list[str] = []
        facts = read_facts(folder, faults)
        settings = [] if facts is None else read_settings(folder, facts, faults)
        entry = None if facts is None else json.dumps(_entry(facts))
        self._connection.execute(
            "UPDATE run SET faults = ?, entry = ?, settings = ? WHERE id = ?",
            (json.dumps(faults), entry, pack(self._number(setting) for setting in settings), id),
        )

    def _number(self, setting: tuple[str, config_sections.Cell]) -> int:
        """The number of a key with a value, which is put into the table when it is first seen."""
        number = self._settings.get(setting)
        if number is None:
            row = self._connection.execute("SELECT id FROM setting WHERE key = ? AND value = ?", setting).fetchone()
            if row is None:
                row = (self._connection.execute("INSERT INTO setting (key, value) VALUES (?, ?)", setting).lastrowid,)
            number = self._settings[setting] = int(row[0])
        return number

    def _position(self, path: str, known: IndexEntry | None, stamp: FileStamp) -> Position:
        """A file that grew is read from where it was left; a resumed run puts another one in its place."""
        since = known.position if known is not None else Position()
        inode, size, _ = (stamp.metrics or "0:0:0").split(":")
        has_grown = int(inode) == since.inode and int(size) >= since.offset
        return since if has_grown and tail(self.root / path / METRICS, since.offset) == since.tail else Position()

    def _keep_metrics(
        self, id: int, since: Position, now: Position, traces: dict[str, MetricSummary], faults: list[str]
    ) -> None:
        if since.offset:
            columns = "name, step, last, low, low_step, high, high_step"
            rows = self._connection.execute(f"SELECT {columns} FROM metric WHERE run = ?", (id,))
            for name, *earlier in rows.fetchall():
                traces[name] = MetricSummary(*earlier).then(traces[name]) if name in traces else MetricSummary(*earlier)
            ((before,),) = self._connection.execute("SELECT metrics_faults FROM run WHERE id = ?", (id,))
            faults = [*(fault for fault in json.loads(before or "[]") if HALF not in fault), *faults]
        self._connection.execute("DELETE FROM metric WHERE run = ?", (id,))
        self._connection.executemany(
            "INSERT INTO metric VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            [(name, id, t.step, t.last, t.low, t.low_step, t.high, t.high_step) for name, t in traces.items()],
        )
        step = max((trace.step for trace in traces.values()), default=None)
        self._connection.execute(
            "UPDATE run SET inode = ?, offset = ?, lines = ?, tail = ?, step = ?, metrics_faults = ? WHERE id = ?",
            (*now, step, json.dumps(faults), id),
        )

    def _forget(self, id: int) -> None:
        self._connection.execute("DELETE FROM metric WHERE run = ?", (id,))
        self._connection.execute("DELETE FROM run WHERE id = ?", (id,))


@contextlib.contextmanager
def _mapping(count: int) -> Iterator[Callable[..., Iterable[Any]]]:
    """`map`, by several processes where there is much to do: nearly all of the time goes into parsing."""
    if count < MANY:
        yield map
        return
    # Spawned, not forked: the server has threads.
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield functools.partial(pool.map, chunksize=CHUNK)


def pack(numbers: Iterable[int]) -> bytes:
    """Four bytes each."""
    return array("I", numbers).tobytes()


def unpack(packed: bytes) -> "array[int]":
    return array("I", packed)


def _connect(file: str) -> sqlite3.Connection:
    """Open, and make the tables where they are not this version's. Raises DatabaseError on what is no index."""
    # The server asks from one thread after the other.
    connection = sqlite3.connect(file, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    try:
        # A rebuildable file needs no patience with the disk.
        connection.execute("PRAGMA synchronous = OFF")
        # 64 MB: the tables of ten thousand runs fit, and are not written page by page while they are made.
        connection.execute("PRAGMA cache_size = -65536")
        (version,) = connection.execute("PRAGMA user_version").fetchone()
        if version != VERSION:
            if version or connection.execute("SELECT name FROM sqlite_master").fetchone():
                raise sqlite3.DatabaseError("another version")
            connection.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {VERSION}; COMMIT;")
    except BaseException:
        connection.close()
        raise
    return connection


def _entry(facts: Facts) -> dict[str, Any]:
    """What is shown of every run; the rest is read from run.json when one is looked at."""
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
