"""The runs under a folder: which there are, what their settings and metrics are, and which one a name means."""

import json
from collections.abc import Iterable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from maxhydra.config.errors import ConfigError, Problem, did_you_mean
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import from_number
from maxhydra.record.liveness import is_lost
from maxhydra.record.run_dir import LOST_REASON
from maxhydra.runs.config_sections import Cell
from maxhydra.runs.index import Index, unpack
from maxhydra.runs.scan import HALF

STATUSES = ("running", "finished", "failed", "preempted", "lost")
# A metric's name may end in one of these; without, its last value is meant.
PARTS = {"last": "last", "min": "low", "max": "high"}
_SHOWN_NAMES = 8


class Run(NamedTuple):
    """One run, as a line of a listing."""

    id: int
    path: str
    """Relative to the folder of runs: the run's name everywhere."""
    task: str | None
    model: str | None
    status: str
    reason: str | None
    created: str
    updated: str
    seconds: float
    step: int | None
    objective: str | None
    """Name of the metric that the run was to make small, and its value at the end."""
    value: float | None
    host: str
    devices: str | None
    commit: str | None
    dirty: bool
    tags: tuple[str, ...]
    notes: str
    change: int
    """Grows with every change: see Registry.token."""

    @property
    def sweep(self) -> str:
        """The folder that holds the run and its like; empty for a run that stands alone."""
        return self.path.rpartition("/")[0]


# What can be asked of a run by name, besides settings and metrics.
FIELDS = ("path", "sweep", "status", "tag", "created", "updated", "seconds", "step", "value", "host", "commit", "notes")


class Registry:
    """The runs of a folder and of all folders below it, as they are on disk at the last `refresh`."""

    def __init__(self, root: Path | str):
        self.root = Path(root)
        if not self.root.is_dir():
            hint = "runs are looked for in outputs/ of the working directory; -o FOLDER names another place"
            raise ConfigError(Problem("--outputs", "is not a folder", value=str(root), hint=hint))
        self._index = Index(self.root)
        self.refresh()

    def refresh(self) -> None:
        """Take in what changed on disk since."""
        self._index.refresh()

    def close(self) -> None:
        self._index.close()

    @property
    def token(self) -> str:
        """Changes whenever a run does."""
        ((epoch, change),) = self._index.rows("SELECT epoch, change FROM counter")
        return f"{epoch}-{change}"

    def runs(self) -> list[Run]:
        """All of them, newest first."""
        rows = self._index.rows("SELECT entry, id, path, change, step FROM run WHERE entry IS NOT NULL")
        # One call for all, which is faster than thousands.
        entries = json.loads(f"[{','.join(row[0] for row in rows)}]")
        found = [_run(entry, *row[1:]) for entry, row in zip(entries, rows, strict=True)]
        return sorted(found, key=lambda run: (run.created, run.path), reverse=True)

    def faults(self) -> list[str]:
        """What was skipped, one line for each place; half a line of a run that goes on is being written."""
        lines = []
        query = "SELECT path, entry, faults, metrics_faults FROM run WHERE faults != '[]' OR metrics_faults != '[]'"
        for path, entry, *faults in self._index.rows(query):
            is_running = entry is not None and _is_running(json.loads(entry))
            found = [fault for part in faults for fault in json.loads(part or "[]")]
            lines += [f"{self.root / path}/{f}" for f in found if not (is_running and HALF in f)]
        return sorted(lines)

    def settings(self, ids: Iterable[int]) -> dict[int, dict[str, Cell]]:
        """The whole config of some runs, and the options that were chosen."""
        known = {number: (key, value) for number, key, value in self._index.rows("SELECT id, key, value FROM setting")}
        packed = dict(self._index.rows("SELECT id, settings FROM run"))
        return {id: dict(sorted((known[n] for n in unpack(packed[id])), key=itemgetter(0))) for id in ids}

    def metrics(self, ids: Iterable[int]) -> dict[int, dict[str, float | None]]:
        """The last value of each metric of some runs."""
        return {id: dict(self._index.rows("SELECT name, last FROM metric WHERE run = ?", id)) for id in ids}

    def keys(self) -> list[str]:
        """Every setting and every group that any run has, or had."""
        return [key for (key,) in self._index.rows("SELECT DISTINCT key FROM setting ORDER BY key")]

    def metric_names(self) -> list[str]:
        return [name for (name,) in self._index.rows("SELECT DISTINCT name FROM metric ORDER BY name")]

    def values(self, name: str, runs: Sequence[Run]) -> dict[int, Any]:
        """A field, setting, group or metric of the runs that have it. ConfigError where nothing is called so."""
        if name in FIELDS:
            return {run.id: getattr(run, "tags" if name == "tag" else name) for run in runs}
        found: dict[int, Any] = {**(self.setting(name) or self.metric(name))}
        if not found and runs:
            raise ConfigError(self._unknown(name))
        return found

    def setting(self, key: str) -> dict[int, Cell]:
        """A key of the config, or a group, in each run that has it."""
        values = dict(self._index.rows("SELECT id, value FROM setting WHERE key = ?", key))
        packed = self._index.rows("SELECT id, settings FROM run") if values else []
        # A run has one value of a key: its number is looked for among the run's own, by C code alone.
        found = ((id, next(filter(values.__contains__, unpack(numbers)), None)) for id, numbers in packed)
        return {id: values[number] for id, number in found if number is not None}

    def metric(self, name: str) -> dict[int, float | None]:
        """Its last value (or NAME:min, NAME:max) in each run that has it; None where it is not finite."""
        metric, _, part = name.rpartition(":")
        if part not in PARTS or not metric:
            metric, part = name, "last"
        return dict(self._index.rows(f"SELECT run, {PARTS[part]} FROM metric WHERE name = ?", metric))

    def _unknown(self, name: str) -> Problem:
        known = [*FIELDS, *self.keys(), *self.metric_names()]
        ends = [key for key in known if key.rpartition(".")[2] == name]
        hint = f"did you mean {ends[0]!r}?" if ends else did_you_mean(name, known)
        metrics = ", ".join(self.metric_names()[: 2 * _SHOWN_NAMES])
        accepted = f"{', '.join(FIELDS)}; any key of the config; a metric ({metrics}), also with :min or :max"
        return Problem(name, "no run has a setting or a metric of this name", accepted=accepted, hint=hint)

    def find(self, name: str, runs: Sequence[Run] | None = None) -> Run:
        """The run that a name means: its path, a folder on disk, its last part, or the beginning of either."""
        runs = self.runs() if runs is None else runs
        wanted = self._relative(name)
        for matches in (
            [run for run in runs if run.path == wanted],
            [run for run in runs if run.path.rpartition("/")[2] == wanted],
            [run for run in runs if run.path.startswith(wanted) or run.path.rpartition("/")[2].startswith(wanted)],
        ):
            if len(matches) == 1:
                return matches[0]
            if matches:
                some = ", ".join(run.path for run in matches[:_SHOWN_NAMES])
                more = f" and {len(matches) - _SHOWN_NAMES} more" if len(matches) > _SHOWN_NAMES else ""
                raise ConfigError(Problem(name, f"{len(matches)} runs are called so", accepted=some + more))
        newest = f"the newest is {runs[0].path!r}" if runs else f"{self.root} holds no runs"
        hint = did_you_mean(wanted, [part for run in runs for part in (run.path, run.path.rpartition("/")[2])])
        raise ConfigError(Problem(name, "no such run", hint=hint or newest))

    def under(self, name: str) -> tuple[str, list[Run]]:
        """A sweep or any other folder below this one ("" for this one) with its runs; for a run's name, that run."""
        runs, wanted = self.runs(), self._relative(name)
        if wanted == ".":
            return "", runs
        inside = [run for run in runs if run.path.startswith(f"{wanted}/")]
        if inside:
            return wanted, inside
        found = self.find(name, runs)
        return found.path, [found]

    def _relative(self, name: str) -> str:
        """A path that a shell completed (outputs/x/) as a path below the folder of runs."""
        path, root = Path(name), self.root.resolve()
        if path.is_dir() and path.resolve().is_relative_to(root):
            return path.resolve().relative_to(root).as_posix()
        return name.rstrip("/")

    def directory(self, run: Run) -> RunDirectory:
        return RunDirectory(self.root / run.path, writes=False)


def _is_running(entry: dict[str, Any]) -> bool:
    return entry["status"] == "running" and not is_lost(entry["session"], entry["updated"])


def _run(entry: dict[str, Any], id: int, path: str, change: int, step: int | None) -> Run:
    is_gone = entry["status"] == "running" and not _is_running(entry)
    value = from_number(entry["value"])
    return Run(
        id=id,
        path=path,
        task=entry["task"],
        model=entry["model"],
        status="lost" if is_gone else entry["status"],
        reason=LOST_REASON if is_gone else entry["reason"],
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
