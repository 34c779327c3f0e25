"""Settings of hydra/launcher=slurm, and the batch script of a job or job array that they render."""

import dataclasses
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.base import (
    CLAIM,
    CONSOLE,
    ELASTIC,
    KEY,
    LauncherSettings,
    choice_problems,
    fewest_problems,
    minimum_problems,
    pattern_problems,
)
from maxhydra.launch.job_spec import CONFIG
from maxhydra.record.redact import redact_text

RUNTIMES = ("pyxis", "apptainer")
# sbatch parameters set by the launcher, which relies on them.
RESERVED = {"array", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"}
RESERVED |= {"parsable", "requeue", "signal", "wait", "wrap"}
MINIMUMS = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "array_parallelism": 0}
MINIMUMS |= {"save_seconds": 1, "max_requeues": 0, "poll_seconds": 1}
# Upper bound of sbatch --signal.
MAX_SAVE_SECONDS = 65535
# Each parameter is one line of the script, so a value must not be able to add another.
WORD = (r"[^\s'\"\\]+", "one word without quotes or backslashes")

PATTERNS = {
    "partition": WORD,
    "account": WORD,
    "qos": WORD,
    "constraint": WORD,
    "mem": (r"\d+[KMGT]?", "such as 64G, for each node"),
    "time": (r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "container": WORD,
    "python": WORD,
}


@dataclasses.dataclass(frozen=True)
class SlurmSettings(LauncherSettings):
    """hydra.launcher with hydra/launcher=slurm. A job is one run on any number of nodes, with one process per task."""

    kind: ClassVar[str] = "slurm"

    partition: str | None = None
    """null, here and below: the cluster's default."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    min_nodes: int | None = None
    """Fewest nodes with which a job may start, or restart after the loss of a node, with train.elastic=true. null: all
    of nodes."""
    tasks_per_node: int = 1
    """Processes per node, which share the node's GPUs evenly."""
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: str | None = None
    """Memory per node, such as 64G."""
    time: str | None = None
    """Time limit of one session, such as 4:00:00. A job that reaches it saves, is requeued, and resumes."""
    save_seconds: int = 120
    """Seconds before the time limit at which a job is signalled to save and exit."""
    max_requeues: int = 20
    """Maximum number of requeues of a job that was preempted or reached its time limit."""
    array_parallelism: int = 0
    """Maximum number of jobs of a sweep that run at a time. 0: limited by the cluster only."""
    container: str | None = None
    """Container image of the jobs."""
    container_runtime: str = "pyxis"
    """pyxis (srun --container-image) or apptainer."""
    container_mounts: tuple[str, ...] = ()
    """FROM:TO for each mounted folder. The sweep's folder is always mounted."""
    python: str | None = None
    """Python interpreter on the nodes. null: the submitting one; in a container, `python`."""
    setup: tuple[str, ...] = ()
    """Lines of the batch script before the job starts, such as module load or export."""
    sbatch: tuple[str, ...] = ()
    """Additional sbatch parameters: [--exclusive, '--gres=gpu:8']."""
    srun: tuple[str, ...] = ()
    """Additional srun arguments."""
    detach: bool = False
    """Submit, print the job ids and return. Unsupported for searches, which need results to choose the next trial."""
    poll_seconds: int = 5
    """Seconds between queries of the scheduler."""

    @property
    def detached(self) -> bool:
        return self.detach

    @property
    def overrides(self) -> tuple[str, ...]:
        return () if self.min_nodes is None else (ELASTIC,)

    @property
    def seconds(self) -> int | None:
        """Time limit in seconds."""
        if self.time is None:
            return None
        days, _, clock = str(self.time).rpartition("-")
        parts = [int(part) for part in clock.split(":")]
        if days:
            hours, minutes, seconds = [*parts, 0, 0][:3]
        elif len(parts) == 1:
            hours, minutes, seconds = 0, parts[0], 0
        else:
            hours, minutes, seconds = [0, *parts][-3:]
        return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds

    def problems(self) -> Iterator[Problem]:
        yield from minimum_problems(self, MINIMUMS)
        yield from fewest_problems(self, "min_nodes", "nodes")
        yield from choice_problems(self, {"container_runtime": RUNTIMES})
        malformed = list(pattern_problems(self, PATTERNS))
        yield from malformed
        yield from self._time_problems() if not any(problem.path == f"{KEY}.time" for problem in malformed) else ()
        for mount in self.container_mounts:
            if not re.fullmatch(r"[^:,\s]+:[^:,\s]+(:\w+)?", str(mount)):
                yield Problem(f"{KEY}.container_mounts", "is malformed", mount, "FROM:TO")
        if self.container_mounts and self.container is None:
            yield Problem(f"{KEY}.container_mounts", "requires hydra.launcher.container", list(self.container_mounts))
        if isinstance(self.save_seconds, int) and self.save_seconds > MAX_SAVE_SECONDS:
            yield Problem(f"{KEY}.save_seconds", "is out of range", self.save_seconds, f"{MAX_SAVE_SECONDS} or less")
        if not isinstance(self.detach, bool):
            yield Problem(f"{KEY}.detach", "is not a boolean", self.detach, "true, false")
        for name in ("setup", "sbatch", "srun"):
            for line in getattr(self, name):
                if "\n" in str(line):
                    yield Problem(f"{KEY}.{name}", "has an entry with several lines", line, "one line per entry")
                if redact_text(str(line)) != str(line):
                    reason = "contains what looks like a secret, and batch scripts are stored in the sweep's folder"
                    hint = "export it before submitting, or read it from a file: 'export NAME=$(cat FILE)'"
                    yield Problem(f"{KEY}.{name}", reason, redact_text(str(line)), hint=hint)
        for parameter in self.sbatch:
            match = re.match(r"--([a-z][-a-z0-9]*)", str(parameter))
            if match is None:
                yield Problem(f"{KEY}.sbatch", "is malformed", parameter, "--name or --name=value")
            elif match[1] in RESERVED:
                yield Problem(f"{KEY}.sbatch", "is set by the launcher", parameter)

    def _time_problems(self) -> Iterator[Problem]:
        if (limit := self.seconds) is not None and limit <= self.save_seconds:
            reason = f"must be longer than save_seconds={self.save_seconds}, the time reserved for saving"
            yield Problem(f"{KEY}.time", reason, self.time, hint=f"use a longer time, or a smaller {KEY}.save_seconds")


# Folder below the sweep's with the batch scripts and the output of SLURM itself.
SCRIPTS = ".slurm"


def render(settings: SlurmSettings, *, name: str, sweep: Path, folders: Sequence[Path]) -> str:
    """Render the script of one job, or of an array with one task per folder."""
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {parameter}" for parameter in _parameters(settings, name, sweep, len(folders))),
        "",
        "folders=(",
        *(f"  {shlex.quote(str(folder))}" for folder in folders),
        ")",
        "folder=${folders[${SLURM_ARRAY_TASK_ID:-0}]}",
        "# A killed controller may have submitted this job twice: only the one named in the claim runs.",
        f'grep -qsF \'"{name}"\' "$folder/{CLAIM}" || exit 0',
        f'exec >> "$folder/{CONSOLE}" 2>&1',
        *_setup(settings),
        f'{_command(settings, sweep)} "$folder/{CONFIG}" --run-dir "$folder"',
        "code=$?",
        *_requeue(settings),
        "exit $code",
    ]
    return "\n".join(lines) + "\n"


def _parameters(settings: SlurmSettings, name: str, sweep: Path, jobs: int) -> Iterator[str]:
    yield f"--job-name={name}"
    if jobs > 1:
        at_a_time = f"%{settings.array_parallelism}" if settings.array_parallelism else ""
        yield f"--array=0-{jobs - 1}{at_a_time}"
    yield f"--output={shlex.quote(f'{sweep}/{SCRIPTS}/%x-%a.out' if jobs > 1 else f'{sweep}/{SCRIPTS}/%x.out')}"
    # A requeued job appends to its earlier output.
    yield "--open-mode=append"
    yield "--requeue"
    # Sent to the processes of srun, not to this script, which waits for them.
    yield f"--signal=USR1@{settings.save_seconds}"
    for option in ("partition", "account", "qos", "constraint", "time", "mem"):
        if (value := getattr(settings, option)) is not None:
            yield f"--{option}={value}"
    yield f"--nodes={settings.nodes if settings.min_nodes is None else f'{settings.min_nodes}-{settings.nodes}'}"
    yield f"--ntasks-per-node={settings.tasks_per_node}"
    yield f"--cpus-per-task={settings.cpus_per_task}"
    if settings.gpus_per_node:
        yield f"--gpus-per-node={settings.gpus_per_node}"
    yield from map(str, settings.sbatch)


def _setup(settings: SlurmSettings) -> list[str]:
    return ["set -e", *map(str, settings.setup), "set +e"] if settings.setup else []


def _command(settings: SlurmSettings, sweep: Path) -> str:
    """srun command in front of the worker. If one process fails, srun kills the others, which would hang."""
    # Since SLURM 22.05, srun does not inherit --cpus-per-task from the job.
    command = ["srun", "--kill-on-bad-exit=1", f"--cpus-per-task={settings.cpus_per_task}", *map(str, settings.srun)]
    mounts = [f"{sweep}:{sweep}", *map(str, settings.container_mounts)]
    match settings.container, settings.container_runtime:
        case None, _:
            pass
        case image, "pyxis":
            command += [f"--container-image={image}", f"--container-mounts={','.join(mounts)}"]
        case image, _:
            gpus = ["--nv"] if settings.gpus_per_node else []
            binds = [word for mount in mounts for word in ("--bind", mount)]
            command += ["apptainer", "exec", *gpus, *binds, image]
    default_python = "python" if settings.container else sys.executable
    return shlex.join([*command, settings.python or default_python, "-m", "maxhydra", "job"])


def _requeue(settings: SlurmSettings) -> list[str]:
    """Requeue a job that saved after a signal, unless it was cancelled, in which case it is no longer RUNNING."""
    return [
        # 75: a process of the run is lost (runtime/peers.py).
        "if [ $code = 138 ] || [ $code = 143 ] || [ $code = 75 ]; then",
        # In an array, $SLURM_JOB_ID of one of the tasks equals the array's id.
        "  job=$SLURM_JOB_ID",
        "  [ -z $SLURM_ARRAY_TASK_ID ] || job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID",
        '  if [ "$(squeue -h -j $job -o %T)" != RUNNING ]; then',
        '    echo "maxhydra: cancelled"',
        f"  elif [ ${{SLURM_RESTART_COUNT:-0}} -ge {settings.max_requeues} ]; then",
        f'    echo "maxhydra: interrupted more than max_requeues={settings.max_requeues} times"',
        "  else",
        '    echo "maxhydra: interrupted, requeued"',
        "    scontrol requeue $job",
        "  fi",
        "fi",
    ]
