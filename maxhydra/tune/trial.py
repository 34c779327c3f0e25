"""Trials: a candidate timed by a benchmark run in a separate process, the journal, and the resulting experiment.

A crash, a hang or running out of memory ends only that process; also, XLA flags are read once per process. The
experiment has the choices and overrides of the command, and the tuned values.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf

from maxhydra.config import Config, ConfigError, Problem
from maxhydra.config.compose.overrides import parse
from maxhydra.config.registry import GLOBAL, defaults
from maxhydra.config.schema.run import Run
from maxhydra.config.schema.tasks.analysis import BenchTask
from maxhydra.config.serialize import to_job_yaml, to_stored_yaml, to_yaml
from maxhydra.record import RunDirectory, redact_text
from maxhydra.record.atomic_io import replace_file, to_json
from maxhydra.runtime import channel, signals

LINES, TRIALS = "tune.jsonl", "trials"
# Values of `status` in tune.jsonl.
MEASURED, FAILED, NO_MEMORY, TIMED_OUT, PRUNED = "measured", "failed", "no memory", "given up", "hopeless"
WARM_UP = 2
# Exit code of `maxhydra job` for an invalid config.
INVALID_CONFIG = 2
# Variables with the coordinator's address (runtime/distributed.py).
ADDRESS_VARIABLES = {"JAX_COORDINATOR_ADDRESS", "COORDINATOR_ADDRESS"}
# Runs a command that the OS kills when its parent dies: a killed search leaves no trial that holds the devices.
RUN_WITH_PARENT = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """The result of timing a candidate over `steps` steps; a line of tune.jsonl."""

    base: str
    """Digest of the config that is being tuned."""
    key: str
    """Digest of the config that ran."""
    candidate: dict[str, str]
    steps: int
    status: str
    reason: str
    seconds: float
    """Duration of the trial."""
    line: dict[str, Any]
    """The record of task=bench; empty unless the status is `measured`."""

    @property
    def seconds_per_token(self) -> float:
        return 1 / self.line["tokens_per_second"] if self.status == MEASURED else math.inf

    @property
    def memory_gib(self) -> float | None:
        """Peak memory of the device, or the compiler's estimate if the device does not report it."""
        memory: float | None = self.line.get("peak_memory_gib") or self.line.get("needed_memory_gib")
        return memory


def bench_config(config: Config, steps: int) -> Config:
    """The benchmark config of a candidate: the same settings with task=bench."""
    task = BenchTask(name="bench", steps=steps, warm_up=WARM_UP)  # type: ignore[call-arg]
    run = Run(seed=config.run.seed, outputs=config.run.outputs)  # type: ignore[call-arg]
    return dataclasses.replace(config, task=task, run=run)


def digest(config: Config) -> str:
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


class Journal:
    """tune.jsonl: a line per trial, appended as it ends.

    A half-written last line is removed; lines of another config that was tuned in the same folder are ignored.
    """

    def __init__(self, folder: Path, base: str):
        self._folder, self._base = folder, base
        self._all: list[Trial] = []
        path = folder / LINES
        if path.exists():
            complete = path.read_text(encoding="utf-8").rpartition("\n")[0]
            self._all = [Trial(**json.loads(line)) for line in complete.splitlines()]
            replace_file(path, complete + "\n" if complete else "")

    def add(self, trial: Trial) -> None:
        self._all.append(trial)
        with open(self._folder / LINES, "a", encoding="utf-8") as file:
            file.write(to_json(dataclasses.asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, config: Config, candidate: dict[str, str], steps: int, **options: Any) -> Trial:
        """Time a candidate with the given config in a new folder; `options` are those of `run_trial`."""
        start = time.monotonic()
        status, reason, lines = run_trial(config, self._folder / TRIALS / str(len(self._all) + 1), **options)
        trial = self.trial(config, candidate, steps, status=status, reason=reason)
        seconds = round(time.monotonic() - start, 1)
        return dataclasses.replace(trial, seconds=seconds, line=lines[0] if lines else {})

    def trial(self, config: Config, candidate: dict[str, str], steps: int, *, status: str, reason: str) -> Trial:
        """A trial that was not run."""
        return Trial(self._base, digest(config), candidate, steps, status, reason, seconds=0.0, line={})

    @property
    def trials(self) -> list[Trial]:
        return [trial for trial in self._all if trial.base == self._base]

    def find(self, key: str) -> Trial | None:
        return next((trial for trial in self.trials if trial.key == key), None)

    @property
    def seconds(self) -> float:
        return sum(trial.seconds for trial in self.trials)


def run_trial(
    config: Config, folder: Path, *, job_facts: Mapping[str, Any], environment: Mapping[str, str], limit: float
) -> tuple[str, str, list]:
    """Run a benchmark in `folder` for at most `limit` seconds; returns status, reason and records.

    `job_facts` are the choices and overrides of the config, in the format that launchers write for a job. With several
    processes, each of them starts a process of the benchmark, and these form a separate cluster.
    """
    # A trial that was killed leaves its folder behind.
    shutil.rmtree(folder, ignore_errors=True)
    if signals.is_distributed() and (name := signals.received()) is not None:
        end_trials("preempted", f"{name} between trials")
        raise signals.Interrupted(name)
    files = {"job.yaml": to_job_yaml(config), "job.json": to_json(job_facts)}
    order = {"files": files, "run": str(folder), "address": channel.free_address(), "limit": limit}
    channel.broadcast(order)
    code = _run_job(order, folder, environment)
    if code is None:
        return TIMED_OUT, f"exceeded {limit:.0f} s", []
    run = RunDirectory(folder, writes=False)
    facts = run.read() if run.exists() else {}
    if code == 0 and facts.get("status") == "finished":
        return MEASURED, "", facts["lines"]
    reason = str(facts.get("reason") or _error_from_console(folder / "console.txt", code) or f"exited with code {code}")
    return (NO_MEMORY if reason.startswith("out of memory") else FAILED), reason, []


def follow_trials(environment: Mapping[str, str]) -> tuple[str, str]:
    """Other processes than the first: run its trials with it; returns status and reason of the search."""
    while "end" not in (order := channel.broadcast()):
        with tempfile.TemporaryDirectory(prefix="maxhydra-trial-") as folder:
            _run_job(order, Path(folder), environment)
    status, reason = order["end"]
    return status, reason


def end_trials(status: str, reason: str) -> None:
    """Process 0: let the others end."""
    channel.broadcast({"end": [status, reason]})


def _run_job(order: Mapping[str, Any], folder: Path, environment: Mapping[str, str]) -> int | None:
    """Run a benchmark with its input and console in `folder`; returns its exit code, or None if it took too long."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in order["files"].items():
        replace_file(folder / name, content)
    command = [sys.executable, "-m", "maxhydra", "job", str(folder / "job.yaml"), "--run-dir", order["run"]]
    # A launcher's own variables, such as those of SLURM, imply an address, which this variable overrides.
    names = ADDRESS_VARIABLES & environment.keys() or {"JAX_COORDINATOR_ADDRESS"}
    cluster = {} if order["address"] is None else dict.fromkeys(names, order["address"])
    with open(folder / "console.txt", "wb") as console:
        process = subprocess.Popen(
            [sys.executable, "-c", RUN_WITH_PARENT, *command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env={**environment, **cluster},
        )
        try:
            return process.wait(order["limit"])
        except subprocess.TimeoutExpired:
            return None
        finally:
            process.kill()
            process.wait()


def _error_from_console(path: Path, code: int) -> str:
    """The error of a process that recorded no reason: the first config problem, else its last line of output."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    headers = [number for number, line in enumerate(lines[:-1]) if line.startswith("maxhydra: ")]
    if code == INVALID_CONFIG and headers:
        return lines[headers[-1] + 1]
    return lines[-1] if lines else ""


# Sections that belong to the search and not to the tuned config.
SEARCH_SECTIONS = ("task", "run", "objective", "hydra")
OVERLAYS = ("experiment", "debug", "local", "sweep")


def given_keys(overrides: Iterable[str]) -> list[str]:
    """Keys of the tuned config that the command set; ConfigError if an experiment cannot express an override."""
    parsed = parse(list(overrides), loader=None).overrides
    relevant = [item for item in parsed if item.key_or_group.split(".")[0].split("/")[0] not in SEARCH_SECTIONS]
    if deleted := [override.input_line for override in relevant if override.is_delete()]:
        hint = "an experiment cannot delete a key; write an option without it"
        raise ConfigError(Problem(str(deleted[0]), "cannot be written as an experiment", hint=hint))
    return [override.key_or_group for override in relevant if not _is_choice(override.key_or_group, override.value())]


def experiment(
    before: Config, tuned: Config, *, choices: Mapping[str, str], overrides: Iterable[str], comments: Iterable[str]
) -> str:
    """The text of an experiment that composes to the tuned config."""
    old, new = _plain(before), _plain(tuned)
    keys = [*given_keys(overrides), *_changed_paths(old, new)]
    content: dict[str, Any] = {}
    for key in dict.fromkeys(keys):
        _set_path(content, key.split("."), OmegaConf.select(OmegaConf.create(new), key))
    header = [f"# {GLOBAL}", *(f"# {redact_text(line)}".rstrip() for line in comments)]
    values = yaml.safe_dump(_to_plain(content), sort_keys=False, default_flow_style=False, width=10_000)
    return "\n".join([*header, *_defaults_list(choices), values])


def _is_choice(key: str, value: object) -> bool:
    """Whether an override chooses an option of a group, rather than setting a key of a section."""
    return key in dict(defaults()) or "/" in key or (key in OVERLAYS and isinstance(value, str))


def _defaults_list(choices: Mapping[str, str]) -> list[str]:
    """Defaults list of the options that differ from config.yaml; a chosen experiment comes first, to be overridden."""
    default_options = dict(defaults())
    chosen = {group: option for group, option in choices.items() if group not in ("task", "recipe", *OVERLAYS)}
    lines = [f"  - /experiment/{choices['experiment']}"] if "experiment" in choices else []
    changed = {group: option for group, option in chosen.items() if default_options.get(group) != option}
    lines += [f"  - override /{group}: {option}" for group, option in changed.items()]
    return ["defaults:", *lines] if lines else []


def _plain(config: Config) -> dict[str, Any]:
    content = OmegaConf.to_container(OmegaConf.create(to_stored_yaml(config)))
    assert isinstance(content, dict)
    return {str(key): value for key, value in content.items() if key not in SEARCH_SECTIONS}


def _changed_paths(old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Paths of values that differ; lists are compared as a whole."""
    paths: list[str] = []
    for key, value in new.items():
        path, old_value = f"{prefix}{key}", old.get(key)
        if isinstance(value, dict) and isinstance(old_value, dict):
            paths += _changed_paths(old_value, value, f"{path}.")
        elif value != old_value:
            paths.append(path)
    return paths


def _set_path(content: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        content = content.setdefault(name, {})
    content[path[-1]] = value


def _to_plain(content: dict[str, Any]) -> Any:
    """Convert OmegaConf containers to dicts and lists, which PyYAML can write."""
    return OmegaConf.to_container(OmegaConf.create(content))
