"""How the processes of a run meet: what the cluster says, and the only call of jax.distributed.initialize."""

import dataclasses
import os
import re
import socket
import sys
import threading
from collections.abc import Mapping

import jax

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import Cluster, Distributed, Platform
from maxhydra.runtime.detect import DetectedDevices

PATH = "hardware.distributed.cluster"
PORT = 12321

# Local rank and number of processes on this host, as launchers name them.
LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS"),
)


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """Where the processes meet and which of them this is; no coordinator leaves all of it to jax (TPU pods)."""

    seen: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.coordinator is None:
            return f"{self.seen}: jax finds the processes"
        return f"{self.seen}: process {self.index} of {self.count}, coordinator {self.coordinator}"


def detect_cluster(cluster: Cluster, env: Mapping[str, str], found: DetectedDevices) -> ClusterInfo | None:
    """The meeting that a cluster's variables describe; None where this process is alone."""
    match cluster:
        case Cluster.none:
            return None
        case Cluster.slurm:
            return _slurm(env, found)
        case Cluster.gke:
            return _jobset(env) if found.platform is not Platform.tpu else _tpu_pod(env)
        case Cluster.gpu_multiprocess:
            return _gpu_multiprocess(env)
        case Cluster.environment:
            return _environment(env)
        case Cluster.auto:
            return _auto(env, found)


def _auto(env: Mapping[str, str], found: DetectedDevices) -> ClusterInfo | None:
    """SLURM, then a JobSet or TPU pod, then plain variables; a job of one process is alone."""
    # A batch script has the job's variables too, but only srun starts several processes, as a step.
    if "SLURM_STEP_NODELIST" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        return _slurm(env, found)
    if found.platform is Platform.tpu:
        hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
        several = "MEGASCALE_COORDINATOR_ADDRESS" in env or (hosts is not None and len(hosts.split(",")) > 1)
        return _tpu_pod(env) if several or hosts is None else None
    if "JOBSET_NAME" in env and "JOB_COMPLETION_INDEX" in env:
        return _jobset(env)
    named = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "COORDINATOR_ADDRESS")
    return _environment(env) if any(name in env for name in named) else None


def _slurm(env: Mapping[str, str], found: DetectedDevices) -> ClusterInfo:
    """One process per task of srun, coordinator on the first node; each task takes its share of the node's GPUs."""
    [nodes] = _needed(env, "SLURM_STEP_NODELIST")
    job, count, index = (_number(env, name) for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"))
    # node[001-004,007],other -> node001
    host = re.sub(r"^([^,\[]*)(?:\[(\d+)[^\]]*\])?.*", r"\1\2", nodes)
    port = 61440 + (job + _number(env, "SLURM_STEP_ID", 0)) % 4096
    return ClusterInfo(
        seen=f"SLURM job {job}",
        coordinator=env.get("JAX_COORDINATOR_ADDRESS", f"{host}:{port}"),
        count=count,
        index=index,
        local_devices=_share(_number(env, "SLURM_LOCALID", 0), _slurm_tasks_here(env), found.count),
    )


def _slurm_tasks_here(env: Mapping[str, str]) -> int:
    """Tasks on this node, by a list such as 4(x2),1: two nodes with four tasks, then one with one."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    tasks = [int(count) for count, nodes in runs for _ in range(int(nodes or 1))]
    return tasks[_number(env, "SLURM_NODEID", 0)]


def _share(rank: int, processes: int, devices: int) -> tuple[int, ...] | None:
    """This process's part of a host's devices; None where the launcher has parted them already, or there are none."""
    if processes == 1 or devices < processes:
        return None
    each = devices // processes
    return tuple(range(rank * each, (rank + 1) * each))


def _jobset(env: Mapping[str, str]) -> ClusterInfo:
    """Pods of an indexed Job; the JobSet gives pod 0 of its first job a name that all can resolve."""
    jobset, job = _needed(env, "JOBSET_NAME", "REPLICATED_JOB_NAME")
    # Pods are counted anew in each Job of several.
    before = _number(env, "JOBSET_JOB_INDEX", 0) * _number(env, "JOBSET_PODS_PER_JOB", 0)
    own = _number(env, "JAX_PROCESS_ID") if "JAX_PROCESS_ID" in env else before + _number(env, "JOB_COMPLETION_INDEX")
    return ClusterInfo(
        seen=f"GKE JobSet {jobset}",
        coordinator=env.get("JAX_COORDINATOR_ADDRESS", f"{jobset}-{job}-0-0.{jobset}:{PORT}"),
        count=_number(env, "JAX_NUM_PROCESSES"),
        index=own,
    )


def _tpu_pod(env: Mapping[str, str]) -> ClusterInfo:
    return ClusterInfo(seen=f"TPU pod with workers {env.get('TPU_WORKER_HOSTNAMES', 'of the metadata server')}")


def _gpu_multiprocess(env: Mapping[str, str]) -> ClusterInfo:
    """One process per GPU of this host, started by mpirun, torchrun, srun or a loop that sets the same variables."""
    names = next((names for names in LOCAL_RANKS if names[0] in env), LOCAL_RANKS[1])
    rank, count = (_number(env, name) for name in names)
    address = f"{env.get('MASTER_ADDR', '127.0.0.1')}:{env.get('MASTER_PORT', PORT)}"
    return ClusterInfo(
        seen=f"one process per GPU by {names[0]}",
        coordinator=env.get("JAX_COORDINATOR_ADDRESS", address),
        count=count,
        index=rank,
        local_devices=(rank,),
    )


def _environment(env: Mapping[str, str]) -> ClusterInfo:
    prefix = "" if "COORDINATOR_ADDRESS" in env else "JAX_"
    [address] = _needed(env, f"{prefix}COORDINATOR_ADDRESS", f"{prefix}NUM_PROCESSES", f"{prefix}PROCESS_ID")[:1]
    count, index = _number(env, f"{prefix}NUM_PROCESSES"), _number(env, f"{prefix}PROCESS_ID")
    if not re.search(r":\d+$", address):
        reason = f"{prefix}COORDINATOR_ADDRESS={address} has no port"
        raise ConfigError(Problem(PATH, reason, accepted="host:port, the same for every process"))
    if not 0 <= index < count:
        reason = f"{prefix}PROCESS_ID={index} is not one of {prefix}NUM_PROCESSES={count}"
        raise ConfigError(Problem(PATH, reason, accepted=f"0 to {count - 1}"))
    return ClusterInfo(seen=f"{prefix}COORDINATOR_ADDRESS", coordinator=address, count=count, index=index)


def _needed(env: Mapping[str, str], *names: str) -> list[str]:
    """Values of variables that go together; a missing one is an error that names those seen and those needed."""
    missing = [name for name in names if name not in env]
    if missing:
        seen = ", ".join(f"{name}={env[name]}" for name in names if name in env) or "none of them"
        reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        hint = f"seen: {seen}; needed: {', '.join(names)}; hardware.distributed.cluster=none runs this process alone"
        raise ConfigError(Problem(PATH, reason, hint=hint))
    return [env[name] for name in names]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    [value] = _needed(env, name)
    if not value.isdecimal():
        raise ConfigError(Problem(PATH, f"{name}={value} is not a number", accepted="a whole number"))
    return int(value)


def initialize_distributed(meeting: ClusterInfo, distributed: Distributed, platform: Platform) -> None:
    """Wait for the other processes.

    jax aborts the whole process when its own time is up, so it waits in a thread, for longer than we do.
    """
    if platform is Platform.cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _keep_stdout_for_python()
    failure: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=meeting.coordinator,
                num_processes=meeting.count,
                process_id=meeting.index,
                local_device_ids=meeting.local_devices,
                cluster_detection_method=None if meeting.coordinator is None else "deactivate",
                initialization_timeout=distributed.timeout_seconds + 60,
            )
        except Exception as error:
            failure.append(error)

    waiting = threading.Thread(target=initialize, name="jax.distributed", daemon=True)
    waiting.start()
    waiting.join(distributed.timeout_seconds)
    if waiting.is_alive():
        raise ConfigError(_nobody_came(meeting, distributed.timeout_seconds))
    if failure:
        reason = f"{meeting}: {str(failure[0]).splitlines()[0]}"
        raise ConfigError(Problem(PATH, reason, hint="hardware.distributed.cluster=none runs this process alone"))


def _nobody_came(meeting: ClusterInfo, seconds: int) -> Problem:
    if meeting.index == 0:
        who = f"not all of the other {(meeting.count or 0) - 1} processes reached {meeting.coordinator}"
    elif meeting.coordinator is not None and not _answers(meeting.coordinator):
        who = f"process 0 does not answer at {meeting.coordinator}"
    else:
        who = "process 0 answers, but not all of the other processes came"
    return Problem(
        "hardware.distributed.timeout_seconds",
        f"{meeting}; {who} within {seconds} s",
        value=seconds,
        hint="look at the other processes' logs, the address and the firewall, or wait longer",
    )


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except OSError:
        return False


def _keep_stdout_for_python() -> None:
    """gloo writes to file descriptor 1 from C++; send that to stderr, and let Python keep the real stdout."""
    sys.stdout.flush()
    own = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding="utf-8")
