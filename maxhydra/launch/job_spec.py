"""Files between a launcher and its worker: job.yaml and job.json in, a termination message out.

job.yaml is the complete config, job.json the provenance that goes into run.json; both are plain text that the worker
reads without importing Hydra. They live in the run folder; on GKE, in a ConfigMap.

A Kubernetes termination message is the result of a run in 4 KB, for launchers that cannot see the run folder: run.json,
reduced until it fits. The launcher writes it into the sweep's folder, where it is read like any other run.
"""

import dataclasses
import datetime
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.migrations import migrate_config, migrate_overrides
from maxhydra.config.serialize import from_yaml, read_run_facts, to_job_yaml
from maxhydra.record import RunDirectory, scan_metrics, series
from maxhydra.record.atomic_io import read_json, replace_file, to_json
from maxhydra.record.redact import redact_argv, redact_text

CONFIG, FACTS = "job.yaml", "job.json"


@dataclasses.dataclass(frozen=True)
class JobSpec:
    """A valid config, the option chosen in each config group, and the overrides it was composed from."""

    config: Config
    choices: dict[str, str]
    overrides: list[str]
    config_dir: str | None

    def files(self) -> dict[str, str]:
        """Map file names to contents. Overrides are recorded for display only, so secrets in them are redacted."""
        facts = {"choices": self.choices, "overrides": redact_argv(self.overrides), "config_dir": self.config_dir}
        return {CONFIG: to_job_yaml(self.config), FACTS: json.dumps(facts, indent=1) + "\n"}

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in self.files().items():
            replace_file(folder / name, content)


def read_job_spec(path: Path, *, is_run: bool = False) -> JobSpec:
    """Read the job whose config is at `path`; job.json next to it is optional. Raises ConfigError."""
    try:
        config = from_yaml(path.read_text(encoding="utf-8"), str(path), is_run=is_run)
        # In a run folder, run.json holds the same keys for the run's config.yaml.
        facts: dict[str, Any] = {}
        if (job := path.with_name(FACTS)).exists():
            facts = read_json(job)
        elif path.with_name("run.json").exists():
            facts = read_run_facts(path.parent)
        overrides = migrate_overrides(facts.get("overrides", []))
        return JobSpec(config, migrate_config(facts.get("choices", {})), overrides, facts.get("config_dir"))
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(Problem(str(path), f"cannot be read: {error}")) from None
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(Problem(str(path.parent), f"cannot be read: {error}")) from None


VARIABLE = "MAXHYDRA_TERMINATION_LOG"
# Kubernetes truncates termination messages to 4096 bytes.
LIMIT = 4096
REASON_LIMIT = 1000
# Keys dropped in this order until the message fits.
DISPENSABLE = (
    *("packages", "sample", "last", "xla_flags", "seen", "variables", "git", "timings"),
    *("choices", "overrides", "command", "metrics"),
)
# Keys that remain if dropping the above is not enough, for example because of a long note.
ESSENTIAL = ("name", "task", "status", "reason", "objective", "end_step", "created", "updated", "finished")
# Key that marks a run.json written from a message, which the next message may replace.
RELAYED = "relayed"


@contextmanager
def write_termination_message(run: Path | None) -> Iterator[None]:
    """On exit, write the result of the run in this folder to the file named by MAXHYDRA_TERMINATION_LOG, if set."""
    facts: dict[str, Any] = {}
    try:
        yield
        facts = _read_facts(run) or {"status": "finished", "reason": "the task writes no run folder"}
    except ConfigError as error:
        # The run did not start, so run.json, if present, describes an earlier session.
        facts = {"status": "failed", "reason": "; ".join(map(str, error.problems))}
        raise
    except BaseException as error:
        facts = _read_facts(run) or {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
        raise
    finally:
        if (path := os.environ.get(VARIABLE)) is not None:
            # Written in place: the file is a bind mount, so it cannot be replaced by a rename.
            Path(path).write_text(encode_message(facts), encoding="utf-8")


def encode_message(facts: dict[str, Any]) -> str:
    """Serialize run.json to at most `LIMIT` bytes."""
    message = {**facts, "reason": _truncate(facts.get("reason"), REASON_LIMIT)}
    for last in facts.get("sessions", [])[-1:]:
        # Short, since it repeats the run's reason.
        message["sessions"] = [{**last, "reason": _truncate(last.get("reason"), 100)}]
    for name in (None, *DISPENSABLE):
        message.pop(name, None)  # type: ignore[arg-type]
        text = to_json(message)
        if len(text.encode()) <= LIMIT:
            return text
    return to_json({name: message[name] for name in ESSENTIAL if name in message})


def _truncate(reason: Any, limit: int) -> str | None:
    """First `limit` bytes of a reason, with secrets redacted."""
    return None if reason is None else redact_text(str(reason)).encode()[:limit].decode(errors="ignore")


def decode_message(text: str | None) -> dict[str, Any] | None:
    """Parse a termination message; None if the container left something else, such as the end of its log."""
    try:
        facts = json.loads(text or "")
    except ValueError:
        return None
    return facts if isinstance(facts, dict) and isinstance(facts.get("status"), str) else None


def write_relayed_run(path: Path, message: dict[str, Any], config_yaml: str) -> None:
    """Write a local copy of a remote run: run.json, its config, and those of its final metrics that are missing."""
    run = RunDirectory(path, writes=False)
    objective = message.get("objective") or {}
    last = {**message.get("metrics", {}), **({objective["name"]: objective["value"]} if objective else {})}
    numbers = {name: value for name, value in last.items() if isinstance(value, (int, float))}
    path.mkdir(parents=True, exist_ok=True)
    replace_file(run.config_path, config_yaml)
    # Rows that were read from the output of the run while it was running are kept.
    rows = scan_metrics(run.metrics_path).rows
    missing = {name: value for name, value in numbers.items() if series(rows, name)[1][-1:] != [value]}
    with run.metrics_path.open("a", encoding="utf-8") as file:
        file.write(to_json({"step": message.get("end_step") or 0, **missing}) + "\n" if missing else "")
    # Choices and overrides are known locally, even if they were dropped from the message.
    provenance = json.loads((path / FACTS).read_text(encoding="utf-8")) if (path / FACTS).exists() else {}
    facts = {**_default_facts(path.name, message), **provenance, **message, RELAYED: True}
    replace_file(run.facts_path, to_json(facts, indent=2) + "\n")


def _default_facts(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Keys that readers of run.json rely on, for messages that lack them."""
    now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    result = {"status": message["status"], "reason": message.get("reason")}
    session = {
        "started": now,
        "ended": now,
        **result,
        "seconds": 0,
        "command": [],
        "host": None,
        "pid": None,
        "git": None,
    }
    session |= {"pid": None, "pid_started": None, "devices": None, "start_step": None, "end_step": None}
    facts = {"name": name, "task": None, **result, "created": now, "updated": now, "finished": now, "host": None}
    facts |= {"command": [], "folder": os.getcwd(), "git": None, "choices": {}}
    return {**facts, "tags": [], "sessions": [session]}


def remove_relayed_run(path: Path) -> None:
    """Remove what `write_relayed_run` wrote, because the remote run resumes. Leaves a real run folder untouched."""
    run = RunDirectory(path, writes=False)
    if run.exists() and run.read().get(RELAYED):
        run.metrics_path.unlink(missing_ok=True)
        run.facts_path.unlink()


def _read_facts(path: Path | None) -> dict[str, Any]:
    """Contents of run.json; empty if it does not exist."""
    run = None if path is None else RunDirectory(path, writes=False)
    return run.read() if run is not None and run.exists() else {}
