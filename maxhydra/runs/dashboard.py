"""JSON responses of the dashboard: runs and their changes, curves, comparisons, sweeps, evaluations and logs."""

import dataclasses
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import scan_metrics
from maxhydra.record.facts import SWEEP_FILE
from maxhydra.record.metrics import Row
from maxhydra.record.redact import redact_text
from maxhydra.runs import query
from maxhydra.runs.actions import (
    cancel_sweep,
    change_note,
    change_tags,
    live_process,
    resume_in_background,
    stop_run,
)
from maxhydra.runs.compare import compare, differing_keys
from maxhydra.runs.curves import compare_charts, encode, is_system, step_axes
from maxhydra.runs.evaluations import evaluation_table, read_grids
from maxhydra.runs.profile import COLUMNS, profile_folders, summarize_profile
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.report import report_page
from maxhydra.runs.rerun import rerun_command
from maxhydra.runs.rollouts import describe, find_rollouts, kinds_of, parse_query
from maxhydra.runs.sweep import (
    Sweep,
    read_sweep,
    sweep_axes,
    sweep_importance,
    sweep_lines,
    sweep_page,
)

# Minimum interval between scans of the folder, however many pages are open.
REFRESH_SECONDS = 1.5
# Points of a line at most, of the lines of one chart together, and of a line at least.
POINTS, TOTAL_POINTS, MIN_POINTS = 1000, 16_000, 150
LOG_BYTES = 64 * 1024
# Lines of a search in a log.
LOG_LINES = 2000
SHOWN_PROFILES = 3
# Number of runs whose parsed metrics are cached.
CACHED_RUNS = 32
# Metrics of each run in the table.
TABLE_METRICS = ("loss", "eval/loss", "tokens_per_second")


class Dashboard:
    """Serves requests from many threads, one at a time, because the index has one connection."""

    def __init__(self, registry: Registry):
        self.registry = registry
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._rows: dict[str, tuple[tuple[int, int], list[Row]]] = {}

    def runs(self, since: str) -> dict[str, Any]:
        """Runs that changed since a token; all runs if the token is unknown."""
        with self._lock:
            self._refresh()
            runs, token = self.registry.runs(), self.registry.token
            epoch, _, change = since.partition("-")
            is_known = token.startswith(f"{epoch}-") and change.isdigit()
            known_change = int(change) if is_known else -1
            # A process can die without a change of its files.
            changed = [run for run in runs if run.change > known_change or run.status in ("running", "lost")]
            return {"token": token, "whole": not is_known, "count": len(runs), **self._rows_of(changed)}

    def newest_runs(self, limit: int) -> dict[str, Any]:
        """The newest runs of the last refresh, which a page shows while it waits for all of them."""
        with self._lock:
            runs = self.registry.runs(limit)
            return {"token": "", "whole": False, "count": self.registry.count(), **self._rows_of(runs)}

    def _rows_of(self, runs: Sequence[Run]) -> dict[str, Any]:
        """Rows of the list of runs, and unreadable files."""
        values = {name: self.registry.metric(name) for name in TABLE_METRICS}
        steps = self.registry.setting("train.steps", {run.id for run in runs})
        rows = [_row(run, steps.get(run.id), {name: v.get(run.id) for name, v in values.items()}) for run in runs]
        return {"runs": rows, "faults": self.registry.read_errors()}

    def select(self, conditions: Sequence[str]) -> dict[str, Any]:
        """Paths of the runs that match the conditions (command-line syntax), or a description of the problem."""
        with self._lock:
            try:
                return {"paths": [run.path for run in query.select_runs(self.registry, conditions)]}
            except ConfigError as error:
                return {"problem": "; ".join(f"{p.path}: {p.reason} {p.hint}".strip() for p in error.problems)}

    def keys(self) -> dict[str, Any]:
        """All keys that a column can show."""
        with self._lock:
            return {"keys": self.registry.keys(), "metrics": self.registry.metric_names()}

    def values(self, key: str) -> dict[str, Any]:
        """Values of one column, by path."""
        with self._lock:
            runs = self.registry.runs()
            by_id = self.registry.values(key, runs)
            return {"values": {run.path: by_id[run.id] for run in runs if run.id in by_id}}

    def curves(self, paths: Sequence[str]) -> dict[str, Any]:
        """One chart per metric of the selected runs; the look of a line is the index of its run."""
        with self._lock:
            selected = self._known_runs(paths)
            rows = {run.path: self._metrics(run) for run in selected}
            varied = differing_keys(list(self.registry.settings(run.id for run in selected).values()))
        looks = {run.path: str(index % 8) for index, run in enumerate(selected)}
        points = max(MIN_POINTS, min(POINTS, TOTAL_POINTS // max(1, len(selected))))
        return {
            "varied": varied,
            "axes": {run.path: step_axes(rows[run.path], _device_count(run)) for run in selected},
            "charts": [
                {
                    **chart.style,
                    "title": chart.title,
                    "metric": chart.lines[0].metric,
                    "system": is_system(chart.lines[0].metric),
                    "lines": [
                        {**encode(line, points), "run": line.name, "look": looks[line.name]} for line in chart.lines
                    ],
                }
                for chart in compare_charts(rows)
            ],
        }

    def sweep(self, name: str, metric: str | None, largest: bool | None) -> dict[str, Any]:
        """Trials of a sweep in order of creation, their settings and results, and the importance of the settings."""
        with self._lock:
            self._refresh()
            sweep = self._read_sweep(name, metric, largest)
            steps = self.registry.setting("train.steps")
            names = self.registry.metric_names()
        trials = [
            {
                "path": run.path,
                "status": run.status,
                "reason": run.reason,
                "created": run.created,
                "seconds": run.seconds,
                "step": run.step,
                "steps": steps.get(run.id),
                "value": sweep.values.get(run.id),
                "settings": [sweep.settings[run.id].get(key) for key in sweep.varied],
            }
            for run in sorted(sweep.runs, key=lambda run: (run.created, run.path))
        ]
        return {
            "name": name,
            "metric": sweep.metric,
            "compared": sweep.compared_metric,
            "largest": sweep.largest,
            "metrics": names,
            "varied": sweep.varied,
            "axes": sweep_axes(sweep),
            "lines": sweep_lines(sweep),
            "importance": list(sweep_importance(sweep).items()),
            "trials": trials,
            "is_live": (self.registry.root / name / SWEEP_FILE).exists()
            and any(run.status == "running" for run in sweep.runs),
        }

    def _read_sweep(self, name: str, metric: str | None, largest: bool | None) -> Sweep:
        runs = [run for run in self.registry.runs() if run.sweep == name]
        if not runs:
            raise KeyError(name)
        return read_sweep(self.registry, runs, title=name, metric=metric or None, largest=largest)

    def evaluations(self, paths: Sequence[str]) -> dict[str, Any]:
        """Metrics eval/* of the selected runs by step, grids of needle tasks, and final samples."""
        with self._lock:
            selected = self._known_runs(paths)
            facts = [self.registry.facts(run) for run in selected]
            tables = [evaluation_table(self._metrics(run)) for run in selected]
        folders = [self.registry.directory(run).path for run in selected]
        return {
            "runs": [
                {"path": run.path, **table, "grids": read_grids(folder), "sample": each.get("sample")}
                for run, table, folder, each in zip(selected, tables, folders, facts, strict=True)
            ]
        }

    def compare(self, paths: Sequence[str]) -> dict[str, Any]:
        """Settings and environment that differ, all metrics, and facts of each run."""
        with self._lock:
            selected = self._known_runs(paths)
            comparison = compare(self.registry, selected)
            facts = [self.registry.facts(run) for run in selected]
        tables = {name: getattr(comparison, name) for name in ("config", "metrics", "surroundings")}
        return {
            "runs": [run.path for run in selected],
            **{name: [dataclasses.asdict(entry) for entry in entries] for name, entries in tables.items()},
            "facts": [_facts(run, each) for run, each in zip(selected, facts, strict=True)],
        }

    def request_profile(self, path: str) -> str:
        """Ask a live run on this machine for a profile of its next steps; ConfigError if that is impossible."""
        with self._lock:
            run = self.find(path)
            pid = live_process(self.registry, run)
        if pid is None or not _catches_profile_signal(pid):
            reason = "is not a training run that is alive on the machine of the dashboard"
            raise ConfigError(Problem("run", reason, path, hint="on its own machine: kill -USR2 PID"))
        os.kill(pid, signal.SIGUSR2)
        return "requested: shown here after the next steps"

    def act(self, action: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Perform an action of the page, with the code of the verbs of `maxhydra runs`; KeyError if it is unknown."""
        if action == "cancel":
            name = str(body["sweep"])
            with self._lock:
                self._read_sweep(name, None, None)
            return {"done": cancel_sweep(self.registry, name)}
        path = str(body["run"])
        if action == "profile":
            return {"done": self.request_profile(path)}
        with self._lock:
            # The last poll of a page may be old.
            self.registry.refresh()
            run, registry = self.find(path), self.registry
            self._refreshed = 0.0
            match action:
                case "tag":
                    tags = change_tags(registry, run, add=_texts(body.get("add")), remove=_texts(body.get("remove")))
                    return {"done": f"{path}: {' '.join(tags) or 'no tags'}"}
                case "note":
                    return {"done": f"{path}: {change_note(registry, run, str(body['text'])) or 'no note'}"}
                case "stop":
                    return {"done": stop_run(registry, run)}
        if action == "resume":
            return {"done": resume_in_background(registry, run)}
        raise KeyError(action)

    def report(self, path: str) -> str:
        """The report of a run, from its current files."""
        with self._lock:
            directory = self.registry.directory(self.find(path))
        return report_page(directory)

    def sweep_report(self, name: str) -> str:
        """The report of a sweep, from the current files of its runs."""
        with self._lock:
            return sweep_page(self.registry, self._read_sweep(name, None, None))

    def profiles(self, path: str) -> dict[str, Any]:
        """Summaries of a run's profiles, newest first."""
        with self._lock:
            folder = self.registry.directory(self.find(path)).path
        found = []
        for profile in reversed(profile_folders(folder)[-SHOWN_PROFILES:]):
            try:
                summary = summarize_profile(profile)
            except ValueError:
                continue  # being written
            texts = {"name": profile.name, "text": summary.text, "parts": summary.parts_text}
            found.append({**texts, "columns": COLUMNS, "rows": summary.rows})
        return {"profiles": found}

    def log(self, path: str, text: str = "") -> dict[str, Any]:
        """Last part of a run's log; with a text, the last lines that contain it, in any case, with their numbers."""
        with self._lock:
            log = self.registry.directory(self.find(path)).log_path
        if not log.exists():
            return {"text": ""}
        if text:
            return _search_log(log, text)
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            content = file.read(LOG_BYTES).decode(errors="replace")
        return {"text": redact_text(content if size <= LOG_BYTES else content.partition("\n")[2])}

    def rollouts(self, path: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """Completions of a run that match, and the kinds that it has; or the problem of a field."""
        try:
            parsed = parse_query(fields)
        except ConfigError as error:
            return {"problem": str(error)}
        with self._lock:
            folder = self.registry.directory(self.find(path)).path
        page = find_rollouts(folder, parsed)
        records = [{**record, "about": describe(record)} for record in page.records]
        return {"kinds": kinds_of(folder), "total": page.total, "records": records}

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self.registry.refresh()
            self._refreshed = time.monotonic()

    def find(self, path: str) -> Run:
        """The run with this path; KeyError if there is none."""
        found = self._known_runs([path])
        if not found:
            raise KeyError(path)
        return found[0]

    def _known_runs(self, paths: Sequence[str]) -> list[Run]:
        """Runs of the registry with these paths. Paths sent by a browser are never used as file paths."""
        known = {run.path: run for run in self.registry.runs()}
        return [known[path] for path in dict.fromkeys(paths) if path in known]

    def _metrics(self, run: Run) -> list[Row]:
        path = self.registry.directory(run).metrics_path
        try:
            status = path.stat()
        except OSError:
            return []
        stamp = (status.st_ino, status.st_size)
        if self._rows.get(run.path, ((0, 0), []))[0] != stamp:
            self._rows[run.path] = (stamp, scan_metrics(path).rows)
        while len(self._rows) > CACHED_RUNS:
            del self._rows[next(iter(self._rows))]
        return self._rows[run.path][1]


def _row(run: Run, steps: Any, metrics: dict[str, float | None]) -> dict[str, Any]:
    return {
        "path": run.path,
        "status": run.status,
        "reason": run.reason,
        "task": run.task,
        "model": run.model,
        "created": run.created,
        "seconds": run.seconds,
        "step": run.step,
        "steps": steps,
        "objective": run.objective,
        "value": run.value,
        "host": run.host,
        "devices": run.devices,
        "tags": run.tags,
        "notes": run.notes,
        "metrics": metrics,
    }


def _facts(run: Run, facts: dict[str, Any]) -> dict[str, Any]:
    packages = facts.get("packages") or {}
    return {
        "path": run.path,
        "status": run.status,
        "reason": run.reason,
        "again": rerun_command(facts),
        "host": run.host,
        "devices": run.devices,
        "hardware": facts.get("hardware"),
        "processes": facts.get("processes"),
        "commit": (run.commit or "")[:12] + ("*" if run.dirty else ""),
        "jax": packages.get("jax"),
        "timings": facts.get("timings") or {},
    }


def _device_count(run: Run) -> int:
    """Number of devices from a text such as `8 x NVIDIA H200`."""
    count = (run.devices or "").partition(" x ")[0]
    return int(count) if count.isdecimal() else 1


def _search_log(log: Path, text: str) -> dict[str, Any]:
    lines: deque[str] = deque(maxlen=LOG_LINES)
    count, needle = 0, text.lower()
    with log.open(encoding="utf-8", errors="replace") as file:
        for number, line in enumerate(file, start=1):
            if needle in line.lower():
                count += 1
                lines.append(f"{number:>6}  {line}")
    return {"text": redact_text("".join(lines)), "count": count}


def _texts(values: Any) -> list[str]:
    return [str(value) for value in values or []]


def _catches_profile_signal(pid: int) -> bool:
    """Whether a process handles SIGUSR2, which would end any other."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)
