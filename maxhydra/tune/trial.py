"""A candidate timed by an ordinary benchmark run in a process of its own, and the file that keeps what came of each.

A crash, a hang or a lack of memory ends that process alone; flags are read when a process starts jax.
"""

import dataclasses
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from maxhydra.config import Config
from maxhydra.config.schema.run import Run
from maxhydra.config.schema.tasks.bench import BenchTask
from maxhydra.config.serialize import to_yaml
from maxhydra.record import RunDirectory
from maxhydra.record.atomic_io import replace_file, to_json

LINES, TRIALS = "tune.jsonl", "trials"
MEASURED, FAILED, NO_MEMORY, GIVEN_UP, HOPELESS = "measured", "failed", "no memory", "given up", "hopeless"
WARM_UP = 2
# Exit code of `maxhydra job`.
WRONG_CONFIG = 2
# The process asks the kernel to end with its parent: one that is killed leaves no trial behind to hold the devices.
OWNED = (
    "import ctypes, os, signal, sys\n"
    "if sys.platform == 'linux': ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"
    "os.execv(sys.argv[1], sys.argv[1:])"
)


@dataclasses.dataclass(frozen=True)
class Trial:
    """What came of a candidate over so many steps."""

    base: str
    """Digest of the config that is tuned."""
    key: str
    """Digest of the config that ran."""
    candidate: dict[str, str]
    steps: int
    status: str
    reason: str
    seconds: float
    """That the trial took."""
    line: dict[str, Any]
    """What task=bench says; empty unless it was measured."""

    @property
    def seconds_per_token(self) -> float:
        return 1 / self.line["tokens_per_second"] if self.status == MEASURED else math.inf

    @property
    def memory_gib(self) -> float | None:
        """What the device held at most, or what the compiler says where the device does not."""
        found: float | None = self.line.get("peak_memory_gib") or self.line.get("needed_memory_gib")
        return found


def bench_config(config: Config, steps: int) -> Config:
    """The benchmark of a candidate: the same settings under another task, in a folder that is given with the job."""
    task = BenchTask(name="bench", steps=steps, warm_up=WARM_UP)  # type: ignore[call-arg]
    run = Run(seed=config.run.seed, outputs=config.run.outputs)  # type: ignore[call-arg]
    return dataclasses.replace(config, task=task, run=run)


def digest(config: Config) -> str:
    return hashlib.sha256(to_yaml(config).encode()).hexdigest()[:16]


class Journal:
    """tune.jsonl: a line for each trial, added as it ends. A half-written last line is cut off, and those of another
    config, tuned in the same folder, are left alone."""

    def __init__(self, folder: Path, base: str):
        self._folder, self._base = folder, base
        self._all: list[Trial] = []
        path = folder / LINES
        if path.exists():
            whole = path.read_text(encoding="utf-8").rpartition("\n")[0]
            self._all = [Trial(**json.loads(line)) for line in whole.splitlines()]
            replace_file(path, whole + "\n" if whole else "")

    def add(self, trial: Trial) -> None:
        self._all.append(trial)
        with open(self._folder / LINES, "a", encoding="utf-8") as file:
            file.write(to_json(dataclasses.asdict(trial)) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def run(self, config: Config, candidate: dict[str, str], steps: int, **how: Any) -> Trial:
        """Time a candidate whose config is given, in a folder of its own."""
        began = time.monotonic()
        status, reason, lines = run_trial(config, self._folder / TRIALS / str(len(self._all) + 1), **how)
        trial = self.trial(config, candidate, steps, status=status, reason=reason)
        seconds = round(time.monotonic() - began, 1)
        return dataclasses.replace(trial, seconds=seconds, line=lines[0] if lines else {})

    def trial(self, config: Config, candidate: dict[str, str], steps: int, *, status: str, reason: str) -> Trial:
        """One that took no time."""
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
    config: Config, folder: Path, *, told: Mapping[str, Any], environment: Mapping[str, str], limit: float
) -> tuple[str, str, list]:
    """Run a benchmark in `folder` for so many seconds at most: status, reason and lines. `told` is what is known of the
    config besides, as launchers leave it for a job."""
    # One that was killed in the middle leaves a folder behind.
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    replace_file(folder / "job.yaml", to_yaml(config))
    replace_file(folder / "job.json", to_json(told))
    command = [sys.executable, "-m", "maxhydra", "job", str(folder / "job.yaml"), "--run-dir", str(folder)]
    with open(folder / "console.txt", "wb") as console:
        process = subprocess.Popen(
            [sys.executable, "-c", OWNED, *command],
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            env=dict(environment),
        )
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            return GIVEN_UP, f"took over {limit:.0f} s", []
        finally:
            process.kill()
            process.wait()
    facts = RunDirectory(folder, writes=False)
    told = facts.read() if facts.exists() else {}
    if code == 0 and told.get("status") == "finished":
        return MEASURED, "", told["lines"]
    reason = str(told.get("reason") or _last_words(folder / "console.txt", code) or f"ended with code {code}")
    return (NO_MEMORY if reason.startswith("out of memory") else FAILED), reason, []


def _last_words(path: Path, code: int) -> str:
    """Of a process that kept no reason: the first problem of a wrong config, else the last line that it wrote."""
    lines = [line.strip() for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    heads = [number for number, line in enumerate(lines[:-1]) if line.startswith("maxhydra: ")]
    if code == WRONG_CONFIG and heads:
        return lines[heads[-1] + 1]
    return lines[-1] if lines else ""
