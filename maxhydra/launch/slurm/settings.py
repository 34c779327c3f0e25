"""What can be said to SLURM: hydra.launcher with hydra/launcher=slurm."""

import dataclasses
import re
from collections.abc import Iterator
from typing import ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.settings import KEY, LauncherSettings, not_offered, out_of_range, unlike

RUNTIMES = ("pyxis", "apptainer")
# Set by the launcher, which depends on them.
OWN = {"array", "error", "job-name", "no-requeue", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output"}
OWN |= {"parsable", "requeue", "signal", "wait", "wrap"}
LEAST = {"nodes": 1, "tasks_per_node": 1, "gpus_per_node": 0, "cpus_per_task": 1, "array_parallelism": 0}
LEAST |= {"save_seconds": 1, "max_requeues": 0, "poll_seconds": 1}
# SLURM's own bound for --signal.
LONGEST_NOTICE = 65535
# A line of its own for each parameter: none may bring another along.
LINE = (r"[^\s'\"\\]+", "one word")
FORMS = {
    "partition": LINE,
    "account": LINE,
    "qos": LINE,
    "constraint": LINE,
    "mem": (r"\d+[KMGT]?", "such as 64G, for each node"),
    "time": (r"\d+|(\d+-)?\d+(:\d+){1,2}|\d+-\d+", "minutes, hours:minutes:seconds or days-hours:minutes:seconds"),
    "container": LINE,
    "python": LINE,
}


@dataclasses.dataclass(frozen=True)
class SlurmSettings(LauncherSettings):
    """How jobs are submitted. A job is one run on any number of nodes, with a process for each task."""

    kind: ClassVar[str] = "slurm"

    partition: str | None = None
    """Null, here and below: what the cluster takes unless it is told."""
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    nodes: int = 1
    tasks_per_node: int = 1
    """Processes on each node. GPUs of a node are shared out among them."""
    gpus_per_node: int = 0
    cpus_per_task: int = 1
    mem: str | None = None
    """Of each node, such as 64G."""
    time: str | None = None
    """Limit of one session, such as 4:00:00. A job that is not done by then saves, and goes on in the next."""
    save_seconds: int = 120
    """Before the limit a job is told to save and end, so many seconds."""
    max_requeues: int = 20
    """How often a job that was preempted, or ran into its limit, goes back to the queue."""
    array_parallelism: int = 0
    """Jobs of a sweep that may run at a time; 0: as many as the cluster has room for."""
    container: str | None = None
    """Image that jobs run in."""
    container_runtime: str = "pyxis"
    """pyxis (srun --container-image) or apptainer."""
    container_mounts: tuple[str, ...] = ()
    """FROM:TO for each folder of the node that is seen in the container. The sweep's folder always is."""
    python: str | None = None
    """Interpreter on the nodes. Null: the one that submits; in a container, `python`."""
    setup: tuple[str, ...] = ()
    """Lines of the batch script before the job starts: module load, export."""
    sbatch: tuple[str, ...] = ()
    """Further parameters of sbatch: [--exclusive, '--gres=gpu:8']."""
    srun: tuple[str, ...] = ()
    """Further arguments of srun."""
    detach: bool = False
    """Submit, print the ids and return. Not for a search, which waits for results to know what to try next."""
    poll_seconds: int = 5
    """Between two questions to the scheduler."""

    @property
    def detached(self) -> bool:
        return self.detach

    @property
    def seconds(self) -> int | None:
        """The limit of a session."""
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
        yield from out_of_range(self, LEAST)
        yield from not_offered(self, {"container_runtime": RUNTIMES})
        wrong_forms = list(unlike(self, FORMS))
        yield from wrong_forms
        yield from self._time_problems() if not any(problem.path == f"{KEY}.time" for problem in wrong_forms) else ()
        for mount in self.container_mounts:
            if not re.fullmatch(r"[^:,\s]+:[^:,\s]+(:\w+)?", str(mount)):
                yield Problem(f"{KEY}.container_mounts", "cannot be read", mount, "FROM:TO")
        if self.container_mounts and self.container is None:
            yield Problem(f"{KEY}.container_mounts", "goes with a container", list(self.container_mounts))
        if isinstance(self.save_seconds, int) and self.save_seconds > LONGEST_NOTICE:
            yield Problem(f"{KEY}.save_seconds", "is out of range", self.save_seconds, f"{LONGEST_NOTICE} or less")
        if not isinstance(self.detach, bool):
            yield Problem(f"{KEY}.detach", "is not one of the two", self.detach, "true, false")
        for name in ("setup", "sbatch", "srun"):
            for line in getattr(self, name):
                if "\n" in str(line):
                    yield Problem(f"{KEY}.{name}", "holds several lines in one", line, "an entry for each")
        for parameter in self.sbatch:
            found = re.match(r"--([a-z][-a-z0-9]*)", str(parameter))
            if found is None:
                yield Problem(f"{KEY}.sbatch", "cannot be read", parameter, "--name or --name=value")
            elif found[1] in OWN:
                yield Problem(f"{KEY}.sbatch", "is set by the launcher", parameter)

    def _time_problems(self) -> Iterator[Problem]:
        if (limit := self.seconds) is not None and limit <= self.save_seconds:
            reason = f"leaves nothing before the {self.save_seconds} s that are kept for saving"
            yield Problem(f"{KEY}.time", reason, self.time, hint=f"a longer time, or a smaller {KEY}.save_seconds")
