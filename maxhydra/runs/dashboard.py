"""What the dashboard asks for, as JSON: the runs and their changes, curves, comparisons, logs, and this machine."""

import dataclasses
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError
from maxhydra.record import scan_metrics
from maxhydra.record.metrics import Row
from maxhydra.runs.compare import compare
from maxhydra.runs.curves import compared, encode, is_system
from maxhydra.runs.query import select
from maxhydra.runs.registry import Registry, Run
from maxhydra.runs.rerun import rerun_command

# The folder is looked through at most so often, however many pages are open.
REFRESH_SECONDS = 1.5
POINTS = 1000
LOG_BYTES = 64 * 1024
# Runs whose metrics are kept parsed.
KEPT = 32
# Figures of each run that stand in the table.
SHOWN_METRICS = ("loss", "eval/loss", "tokens_per_second")
GPU_QUERY = ("--query-gpu=name,utilization.gpu,memory.used,memory.total", "--format=csv,noheader,nounits")


class Dashboard:
    """Answers from many threads, one at a time: the index has one connection."""

    def __init__(self, registry: Registry):
        self.registry = registry
        self._lock = threading.Lock()
        self._refreshed = 0.0
        self._rows: dict[str, tuple[tuple[int, int], list[Row]]] = {}

    def runs(self, since: str) -> dict[str, Any]:
        """The runs that changed since a token; all of them where that is unknown, or where any went away."""
        with self._lock:
            self._refresh()
            registry = self.registry
            runs, token = registry.runs(), registry.token
            epoch, _, change = since.partition("-")
            is_known = token.startswith(f"{epoch}-") and change.isdigit()
            known_change = int(change) if is_known else -1
            # The state of a process changes without a word in its files.
            changed = [run for run in runs if run.change > known_change or run.status in ("running", "lost")]
            values = {name: registry.metric(name) for name in SHOWN_METRICS}
            steps = registry.setting("train.steps")
            return {
                "token": token,
                "whole": not is_known,
                "count": len(runs),
                "faults": registry.faults(),
                "runs": [
                    _row(run, steps.get(run.id), {n: v.get(run.id) for n, v in values.items()}) for run in changed
                ],
            }

    def select(self, conditions: Sequence[str]) -> dict[str, Any]:
        """Paths of the runs that meet the conditions, in the words of the command line, or what is wrong with them."""
        with self._lock:
            try:
                return {"paths": [run.path for run in select(self.registry, conditions)]}
            except ConfigError as error:
                return {"problem": "; ".join(f"{p.path}: {p.reason} {p.hint}".strip() for p in error.problems)}

    def keys(self) -> dict[str, Any]:
        """Everything that a column can show."""
        with self._lock:
            return {"keys": self.registry.keys(), "metrics": self.registry.metric_names()}

    def values(self, key: str) -> dict[str, Any]:
        """One column: path -> value."""
        with self._lock:
            runs = self.registry.runs()
            found = self.registry.values(key, runs)
            return {"values": {run.path: found[run.id] for run in runs if run.id in found}}

    def curves(self, paths: Sequence[str]) -> dict[str, Any]:
        """A chart for each metric of the chosen runs; a line's look is the place of its run in the choice."""
        with self._lock:
            chosen = self._chosen(paths)
            rows = {run.path: self._metrics(run) for run in chosen}
        looks = {run.path: str(place % 8) for place, run in enumerate(chosen)}
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
                for chart in compared(rows)
            ]
        }

    def compare(self, paths: Sequence[str]) -> dict[str, Any]:
        """Settings and surroundings that differ, and all metrics; of one run, its facts alone."""
        with self._lock:
            chosen = self._chosen(paths)
            found = compare(self.registry, chosen)
            facts = [self.registry.directory(run).read() for run in chosen]
        parts = {name: getattr(found, name) for name in ("config", "metrics", "surroundings")}
        return {
            "runs": [run.path for run in chosen],
            **{name: [dataclasses.asdict(entry) for entry in entries] for name, entries in parts.items()},
            "facts": [_facts(run, each) for run, each in zip(chosen, facts, strict=True)],
        }

    def log(self, path: str) -> dict[str, Any]:
        """The end of a run's log."""
        with self._lock:
            (run,) = self._chosen([path])
            log = self.registry.directory(run).log_path
        if not log.exists():
            return {"text": ""}
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LOG_BYTES))
            text = file.read(LOG_BYTES).decode(errors="replace")
        return {"text": text if size <= LOG_BYTES else text.partition("\n")[2]}

    def _refresh(self) -> None:
        if time.monotonic() - self._refreshed >= REFRESH_SECONDS:
            self.registry.refresh()
            self._refreshed = time.monotonic()

    def _chosen(self, paths: Sequence[str]) -> list[Run]:
        """Only runs that the registry knows: what a browser sends is never a path on the disk."""
        known = {run.path: run for run in self.registry.runs()}
        return [known[path] for path in dict.fromkeys(paths) if path in known]

    def _metrics(self, run: Run) -> list[Row]:
        path = self.registry.directory(run).metrics_path
        try:
            seen = path.stat()
        except OSError:
            return []
        mark = (seen.st_ino, seen.st_size)
        if self._rows.get(run.path, ((0, 0), []))[0] != mark:
            self._rows[run.path] = (mark, scan_metrics(path).rows)
        while len(self._rows) > KEPT:
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


def machine(folder: Path) -> dict[str, Any]:
    """Load, memory and disk of the machine that serves the page, and its GPUs where the driver's tool is there."""
    memory = _memory()
    disk = shutil.disk_usage(folder)
    return {
        "load": round(os.getloadavg()[0], 2),
        "processors": os.cpu_count(),
        "memory": [memory["MemTotal"] - memory["MemAvailable"], memory["MemTotal"]] if memory else None,
        "disk": [disk.used, disk.total],
        "gpus": _gpus(),
    }


def _memory() -> dict[str, int]:
    """Bytes; nothing where there is no /proc."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}


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
