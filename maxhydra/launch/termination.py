"""How a run ended, in the few bytes that a container may leave behind, for those who cannot see the run's folder.

It is run.json without what would not fit. The launcher's side writes it into the sweep's folder, where it is read as
any other run's.
"""

import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxhydra.config.errors import ConfigError
from maxhydra.launch.job_spec import FACTS
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.record.redact import scrub_text

VARIABLE = "MAXHYDRA_TERMINATION_LOG"
# What Kubernetes keeps of a container's last words.
LIMIT = 4096
REASON_LIMIT = 1000
# Left out in this order until the rest fits.
DISPENSABLE = (
    *("packages", "sample", "last", "xla_flags", "seen", "variables", "git", "timings"),
    *("choices", "overrides", "command", "metrics"),
)
# What is left where nothing else fits, such as beside a long note.
ESSENTIAL = ("name", "task", "status", "reason", "objective", "end_step", "created", "updated", "finished")
# Marks a run.json that was made of a message: what is there may be replaced by the next one.
RELAYED = "relayed"


@contextmanager
def write_termination_message(run: Path | None) -> Iterator[None]:
    """Write how the run in this folder ended to the file that MAXHYDRA_TERMINATION_LOG names, if it names one."""
    told: dict[str, Any] = {}
    try:
        yield
        told = _facts(run) or {"status": "finished", "reason": "it keeps no run"}
    except ConfigError as error:
        # The run did not begin: what its folder tells is of an earlier session.
        told = {"status": "failed", "reason": "; ".join(map(str, error.problems))}
        raise
    except BaseException as error:
        told = _facts(run) or {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        if (place := os.environ.get(VARIABLE)) is not None:
            # In place: the file is a mount of its own, which nothing can be renamed onto.
            Path(place).write_text(message(told), encoding="utf-8")


def message(facts: dict[str, Any]) -> str:
    """run.json in so many bytes."""
    told = {**facts, "reason": _short(facts.get("reason"), REASON_LIMIT)}
    for last in facts.get("sessions", [])[-1:]:
        # The run's own reason is the same.
        told["sessions"] = [{**last, "reason": _short(last.get("reason"), 100)}]
    for name in (None, *DISPENSABLE):
        told.pop(name, None)  # type: ignore[arg-type]
        text = to_json(told)
        if len(text.encode()) <= LIMIT:
            return text
    return to_json({name: told[name] for name in ESSENTIAL if name in told})


def _short(reason: Any, limit: int) -> str | None:
    """So many bytes of it, without secrets."""
    return None if reason is None else scrub_text(str(reason)).encode()[:limit].decode(errors="ignore")


def read_message(text: str | None) -> dict[str, Any] | None:
    """None where a container left something else: the end of its log, or nothing."""
    try:
        told = json.loads(text or "")
    except ValueError:
        return None
    return told if isinstance(told, dict) and isinstance(told.get("status"), str) else None


def relay(path: Path, told: dict[str, Any], config_yaml: str) -> None:
    """Write a run that lies elsewhere into its folder here: run.json, its config, and the metrics of its end."""
    run = RunDirectory(path, writes=False)
    objective = told.get("objective") or {}
    last = {**told.get("metrics", {}), **({objective["name"]: objective["value"]} if objective else {})}
    numbers = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    path.mkdir(parents=True, exist_ok=True)
    replace_file(run.config_path, config_yaml)
    replace_file(run.metrics_path, to_json({"step": told.get("end_step") or 0, **numbers}) + "\n" if numbers else "")
    # What it was composed from is known here, whether or not there was room to say it.
    order = json.loads((path / FACTS).read_text(encoding="utf-8")) if (path / FACTS).exists() else {}
    facts = {**_blank(path.name, told), **order, **told, RELAYED: True}
    replace_file(run.facts_path, to_json(facts, indent=2) + "\n")


def _blank(name: str, told: dict[str, Any]) -> dict[str, Any]:
    """What readers of run.json count on, of a run that could say little of itself."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    ending = {"status": told["status"], "reason": told.get("reason")}
    session = {
        "started": now,
        "ended": now,
        **ending,
        "seconds": 0,
        "command": [],
        "host": None,
        "pid": None,
        "git": None,
    }
    session |= {"pid": None, "pid_started": None, "devices": None, "start_step": None, "end_step": None}
    facts = {"name": name, "task": None, **ending, "created": now, "updated": now, "finished": now, "host": None}
    facts |= {"command": [], "folder": os.getcwd(), "git": None, "choices": {}}
    return {**facts, "tags": [], "sessions": [session]}


def forget(path: Path) -> None:
    """Take away what `relay` wrote, where that is all there is: the run goes on elsewhere."""
    run = RunDirectory(path, writes=False)
    if run.exists() and run.read().get(RELAYED):
        run.metrics_path.unlink(missing_ok=True)
        run.facts_path.unlink()


def _facts(run: Path | None) -> dict[str, Any]:
    """What run.json says; nothing where there is none."""
    there = None if run is None else RunDirectory(run, writes=False)
    return there.read() if there is not None and there.exists() else {}
