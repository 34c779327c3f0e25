"""The registry of runs under a folder: list them, read their settings and metrics, and resolve names."""

import json
from collections.abc import Collection, Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import from_number, is_lost
from maxhydra.record.redact import redact_argv, redact_facts
from maxhydra.record.run_dir import LOST_REASON
from maxhydra.record.storage import StorageError, is_remote, unsupported_reason
from maxhydra.runs.index import Index, unpack
from maxhydra.runs.scan import INCOMPLETE_LINE, copy_runs
from maxhydra.runs.settings import Cell
from maxhydra.runs.summary import Facts

STATUSES = ("running", "finished", "failed", "preempted", "pruned", "lost")
# Suffixes of a metric's name and their index columns; the default is the last value.
PARTS = {"last": "last", "min": "low", "max": "high"}
_MAX_NAMES_SHOWN = 8


class Run(NamedTuple):
    """One run, as a line of a listing."""

    id: int
    path: str
    """Path relative to the folder of runs, used as the run's name everywhere."""
    task: str | None
    model: str | None
    status: str
    reason: str | None
    created: str
    updated: str
    seconds: float
    step: int | None
    objective: str | None
    """Name of the metric that the run minimizes, and its final value."""
    value: float | None
    host: str
    devices: str | None
    commit: str | None
    dirty: bool
    tags: tuple[str, ...]
    notes: str
    change: int
    """Change number of the run's last update: see Registry.token."""

    @property
    def sweep(self) -> str:
        """Folder that contains the runs of a sweep; empty for a single run."""
        return self.path.rpartition("/")[0]


# Fields of a run that conditions can refer to, in addition to settings and metrics.
FIELDS = ("path", "sweep", "status", "tag", "created", "updated", "seconds", "step", "value", "host", "commit", "notes")


class Registry:
    """Runs in a folder and its subfolders, as of the last `refresh`."""

    def __init__(self, root: Path | str):
        self.location = str(root)
        self.root = _local_root(self.location)
        if not self.root.is_dir():
            hint = "runs are searched in outputs/ of the working directory; set another folder with -o FOLDER"
            raise ConfigError(Problem("--outputs", "is not a folder", value=str(root), hint=hint))
        self._index = Index(self.root)
        self.refresh()

    def refresh(self) -> None:
        """Read what changed on disk."""
        self._index.refresh()

    def close(self) -> None:
        self._index.close()

    @property
    def token(self) -> str:
        """Changes whenever a run changes."""
        ((epoch, change),) = self._index.rows("SELECT epoch, change FROM counter")
        return f"{epoch}-{change}"

    def runs(self, limit: int | None = None) -> list[Run]:
        """All runs, or at most `limit` of them, newest first."""
        query = "SELECT entry, id, path, change, step FROM run WHERE entry IS NOT NULL"
        if limit is not None:
            # SQLite sorts ten thousand entries in a tenth of the time of parsing all of them here.
            query += f" ORDER BY json_extract(entry, '$.created') DESC, path DESC LIMIT {limit:d}"
        rows = self._index.rows(query)
        # A single json.loads call is faster than thousands.
        entries = json.loads(f"[{','.join(row[0] for row in rows)}]")
        runs = [_run(entry, *row[1:]) for entry, row in zip(entries, rows, strict=True)]
        return sorted(runs, key=lambda run: (run.created, run.path), reverse=True)

    def count(self) -> int:
        """Number of runs."""
        ((count,),) = self._index.rows("SELECT COUNT(*) FROM run WHERE entry IS NOT NULL")
        return int(count)

    def read_errors(self) -> list[str]:
        """Files and lines that could not be read, except the last line of a running run, which may be incomplete."""
        messages = []
        query = "SELECT path, entry, faults, metrics_faults FROM run WHERE faults != '[]' OR metrics_faults != '[]'"
        for path, entry, *columns in self._index.rows(query):
            is_running = entry is not None and _is_running(json.loads(entry))
            errors = [error for column in columns for error in json.loads(column or "[]")]
            messages += [
                f"{self.root / path}/{error}" for error in errors if not (is_running and INCOMPLETE_LINE in error)
            ]
        return sorted(messages)

    def settings(self, ids: Iterable[int]) -> dict[int, dict[str, Cell]]:
        """Complete configs of the given runs, including the options chosen in config groups."""
        known = {number: (key, value) for number, key, value in self._index.rows("SELECT id, key, value FROM setting")}
        packed = dict(self._index.rows("SELECT id, settings FROM run"))
        return {id: dict(sorted((known[n] for n in unpack(packed[id])), key=itemgetter(0))) for id in ids}

    def metrics(self, ids: Iterable[int]) -> dict[int, dict[str, float | None]]:
        """Last value of each metric of the given runs."""
        return {id: dict(self._index.rows("SELECT name, last FROM metric WHERE run = ?", id)) for id in ids}

    def keys(self) -> list[str]:
        """All settings and config groups of any run, including deleted ones."""
        return [key for (key,) in self._index.rows("SELECT DISTINCT key FROM setting ORDER BY key")]

    def metric_names(self) -> list[str]:
        return [name for (name,) in self._index.rows("SELECT DISTINCT name FROM metric ORDER BY name")]

    def values(self, name: str, runs: Sequence[Run]) -> dict[int, Any]:
        """Values of a field, setting, group or metric, by run id. Raises ConfigError if the name is unknown."""
        if name in FIELDS:
            return {run.id: getattr(run, "tags" if name == "tag" else name) for run in runs}
        values: dict[int, Any] = {**(self.setting(name) or self.metric(name))}
        if not values and runs:
            raise ConfigError(self._unknown(name))
        return values

    def setting(self, key: str, ids: Collection[int] | None = None) -> dict[int, Cell]:
        """Values of a config key or group, by run id; of all runs, or of the given ones."""
        values = dict(self._index.rows("SELECT id, value FROM setting WHERE key = ?", key))
        packed = self._index.rows("SELECT id, settings FROM run") if values else []
        chosen = packed if ids is None else [row for row in packed if row[0] in ids]
        # A run has at most one value of a key; `filter` searches its setting ids in C.
        setting_ids = ((id, next(filter(values.__contains__, unpack(numbers)), None)) for id, numbers in chosen)
        return {id: values[number] for id, number in setting_ids if number is not None}

    def metric(self, name: str) -> dict[int, float | None]:
        """Last value of a metric (or NAME:min, NAME:max) by run id; None if it is not finite."""
        metric, _, part = name.rpartition(":")
        if part not in PARTS or not metric:
            metric, part = name, "last"
        return dict(self._index.rows(f"SELECT run, {PARTS[part]} FROM metric WHERE name = ?", metric))

    def _unknown(self, name: str) -> Problem:
        known = [*FIELDS, *self.keys(), *self.metric_names()]
        same_suffix = [key for key in known if key.rpartition(".")[2] == name]
        hint = f"did you mean {same_suffix[0]!r}?" if same_suffix else did_you_mean(name, known)
        metrics = ", ".join(self.metric_names()[: 2 * _MAX_NAMES_SHOWN])
        accepted = f"{', '.join(FIELDS)}; any key of the config; a metric ({metrics}), also with :min or :max"
        return Problem(name, "is not a setting or a metric of any run", accepted=accepted, hint=hint)

    def find(self, name: str, runs: Sequence[Run] | None = None) -> Run:
        """Resolve a name: a path, a folder on disk, the last part of a path, or a prefix of either."""
        runs = self.runs() if runs is None else runs
        path = self._relative(name)
        for matches in (
            [run for run in runs if run.path == path],
            [run for run in runs if run.path.rpartition("/")[2] == path],
            [run for run in runs if run.path.startswith(path) or run.path.rpartition("/")[2].startswith(path)],
        ):
            if len(matches) == 1:
                return matches[0]
            if matches:
                names = ", ".join(run.path for run in matches[:_MAX_NAMES_SHOWN])
                more = f" and {len(matches) - _MAX_NAMES_SHOWN} more" if len(matches) > _MAX_NAMES_SHOWN else ""
                raise ConfigError(Problem(name, f"is ambiguous: {len(matches)} runs match", accepted=names + more))
        newest = f"the newest is {runs[0].path!r}" if runs else f"{self.root} contains no runs"
        hint = did_you_mean(path, [part for run in runs for part in (run.path, run.path.rpartition("/")[2])])
        raise ConfigError(Problem(name, "is not a known run", hint=hint or newest))

    def runs_under(self, name: str) -> tuple[str, list[Run]]:
        """Relative path and runs of a sweep or another subfolder ("" for the root); a run's name gives that run."""
        runs, path = self.runs(), self._relative(name)
        if path == ".":
            return "", runs
        inside = [run for run in runs if run.path.startswith(f"{path}/")]
        if inside:
            return path, inside
        run = self.find(name, runs)
        return run.path, [run]

    def _relative(self, name: str) -> str:
        """Convert a path completed by a shell (outputs/x/) to a path below the folder of runs."""
        path, root = Path(name), self.root.resolve()
        if path.is_dir() and path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
        return name.rstrip("/")

    def facts(self, run: Run) -> Facts:
        """Facts of a run for display: without the secrets that runs of earlier versions have stored."""
        facts = _redact_commands(redact_facts(self.directory(run).read()))
        return {**facts, "sessions": [_redact_commands(session) for session in facts["sessions"]]}

    def directory(self, run: Run) -> RunDirectory:
        return RunDirectory(self.root / run.path, writes=False)


def _local_root(location: str) -> Path:
    """The folder of runs, or a local copy of the small files of the runs below a URL."""
    if not is_remote(location):
        return Path(location)
    if (problem := unsupported_reason(location)) is not None:
        raise ConfigError(Problem("--outputs", problem[0], value=location, hint=problem[1]))
    try:
        return copy_runs(location)
    except StorageError as error:
        hint = "check the address, the network and the credentials"
        raise ConfigError(Problem("--outputs", str(error), value=location, hint=hint)) from error


def _redact_commands(facts: Facts) -> Facts:
    """Redact what only the words of a command together show: `--token VALUE`."""
    return {**facts, **{name: redact_argv(facts[name]) for name in ("command", "overrides") if facts.get(name)}}


def _is_running(entry: dict[str, Any]) -> bool:
    return entry["status"] == "running" and not is_lost(entry["session"], entry["updated"])


def _run(entry: dict[str, Any], id: int, path: str, change: int, step: int | None) -> Run:
    is_dead = entry["status"] == "running" and not _is_running(entry)
    value = from_number(entry["value"])
    return Run(
        id=id,
        path=path,
        task=entry["task"],
        model=entry["model"],
        status="lost" if is_dead else entry["status"],
        reason=LOST_REASON if is_dead else entry["reason"],
        created=entry["created"],
        updated=entry["updated"],
        seconds=entry["seconds"],
        step=step,
        objective=entry["objective"],
        value=value if isinstance(value, (int, float)) else None,
        host=entry["session"]["host"],
        devices=entry["devices"],
        commit=entry["commit"],
        dirty=entry["dirty"],
        tags=tuple(entry["tags"]),
        notes=entry["notes"],
        change=change,
    )
