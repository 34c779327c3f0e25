"""JSON responses of the dashboard: runs and their changes, curves, comparisons, logs, and the local machine."""

import dataclasses
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError, Problem
from maxhydra.record import scan_metrics
from maxhydra.record.atomic_io import is_alive
from maxhydra.record.metrics import Row
from maxhydra.record.processes import memory_info
from maxhydra.record.redact import redact_text
from maxhydra.runs import query
from maxhydra.runs.compare import compare
from maxhydra.runs.curves import compare_charts, encode, is_system
from maxhydra.runs.profile import COLUMNS, profile_folders, summarize_profile
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.rerun import rerun_command
from maxhydra.runs.rollouts import describe, find_rollouts, kinds_of, parse_query

# Minimum interval between scans of the folder, however many pages are open.
REFRESH_SECONDS = 1.5
POINTS = 1000
LOG_BYTES = 64 * 1024
SHOWN_PROFILES = 3
# Number of runs whose parsed metrics are cached.
CACHED_RUNS = 32
# Metrics of each run in the table.
TABLE_METRICS = ("loss", "eval/loss", "tokens_per_second")
GPU_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


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
            registry = self.registry
            runs, token = registry.runs(), registry.token
            epoch, _, change = since.partition("-")
            is_known = token.startswith(f"{epoch}-") and change.isdigit()
            known_change = int(change) if is_known else -1
            # A process can die without a change of its files.
            changed = [run for run in runs if run.change > known_change or run.status in ("running", "lost")]
            values = {name: registry.metric(name) for name in TABLE_METRICS}
            steps = registry.setting("train.steps")
            return {
                "token": token,
                "whole": not is_known,
                "count": len(runs),
                "faults": registry.read_errors(),
                "runs": [
                    _row(run, steps.get(run.id), {n: v.get(run.id) for n, v in values.items()}) for run in changed
                ],
            }

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
        looks = {run.path: str(index % 8) for index, run in enumerate(selected)}
        return {
            "charts": [
                {
                    **chart.style,
                    "title": chart.title,
                    "metric": chart.lines[0].metric,
                    "system": is_system(chart.lines[0].metric),
                    "lines": [
                        {**encode(line, POINTS), "run": line.name, "look": looks[line.name]} for line in chart.lines
                    ],
                }
                for chart in compare_charts(rows)
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

    def request_profile(self, path: str) -> dict[str, Any]:
        """Ask a live run on this machine for a profile of its next steps; ConfigError if that is impossible."""
        with self._lock:
            found = self._known_runs([path])
            if not found:
                raise KeyError(path)
            session = self.registry.facts(found[0])["sessions"][-1]
        pid = session["pid"]
        is_live = found[0].status == "running" and is_alive(session["host"], pid, session["pid_started"])
        if not is_live or not _catches_profile_signal(pid):
            reason = "is not a training run that is alive on the machine of the dashboard"
            raise ConfigError(Problem("run", reason, path, hint="on its own machine: kill -USR2 PID"))
        os.kill(pid, signal.SIGUSR2)
        return {"requested": path}

    def profiles(self, path: str) -> dict[str, Any]:
        """Summaries of a run's profiles, newest first."""
        with self._lock:
            (run,) = self._known_runs([path])
            folder = self.registry.directory(run).path
        found = []
        for profile in reversed(profile_folders(folder)[-SHOWN_PROFILES:]):
            try:
                summary = summarize_profile(profile)
            except ValueError:
                continue  # being written
            texts = {"name": profile.name, "text": summary.text, "parts": summary.parts_text}
            found.append({**texts, "columns": COLUMNS, "rows": summary.rows})
        return {"profiles": found}

    def log(self, path: str) -> dict[str, Any]:
        """Last part of a run's log."""
        with self._lock:
            (run,) = self._known_runs([path])
            log = self.registry.directory(run).log_path
        if not log.exists():
            return {"text": ""}
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
        return {"text": redact_text(text if size <= LOG_BYTES else text.partition("\n")[2])}

    def rollouts(self, path: str, fields: Mapping[str, str]) -> dict[str, Any]:
        """Completions of a run that match, and the kinds that it has; or the problem of a field."""
        try:
            parsed = parse_query(fields)
        except ConfigError as error:
            return {"problem": str(error)}
        with self._lock:
            (run,) = self._known_runs([path])
            folder = self.registry.directory(run).path
        page = find_rollouts(folder, parsed)
        records = [{**record, "about": describe(record)} for record in page.records]
        return {"kinds": kinds_of(folder), "total": page.total, "records": records}

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self.registry.refresh()
            self._refreshed = time.monotonic()

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


def _catches_profile_signal(pid: int) -> bool:
    """Whether a process handles SIGUSR2, which would end any other."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(caught >> (signal.SIGUSR2 - 1) & 1)


def machine(folder: Path) -> dict[str, Any]:
    """Load, memory and disk of the serving machine, and its GPUs if nvidia-smi is installed."""
    memory = memory_info()
    disk = shutil.disk_usage(folder)
    return {
        "load": round(os.getloadavg()[0], 2),
        "processors": os.cpu_count(),
        "memory": [memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"]] if memory else None,
        "disk": [disk.used, disk.total],
        "gpus": _gpus(),
    }


def _gpus() -> list[dict[str, Any]]:
    if shutil.which("nvidia-smi") is None:
        return []
    try:
        done = subprocess.run(["nvidia-smi", *GPU_QUERY], capture_output=True, text=True, timeout=5, check=True)
        rows = [line.split(", ") for line in done.stdout.splitlines()]
        return [
            {"name": name, "busy": float(busy) / 100, "memory": [float(used) * 2**20, float(total) * 2**20]}
            for name, busy, used, total in rows
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return []
