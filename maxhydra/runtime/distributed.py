"""Multi-process set-up: detect the cluster from the environment, and call jax.distributed.initialize."""

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

# Variables of launchers with the local rank and the number of processes on this host.
LOCAL_RANKS = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ("SLURM_LOCALID", "SLURM_NTASKS"),
)


@dataclasses.dataclass(frozen=True)
class ClusterInfo:
    """Coordinator address and index of this process; without a coordinator jax detects both (TPU pods)."""

    seen: str
    coordinator: str | None = None
    count: int | None = None
    index: int | None = None
    local_devices: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.coordinator is None:
            return f"{self.seen}: processes are detected by jax"
        return f"{self.seen}: process {self.index} of {self.count}, coordinator {self.coordinator}"


def detect_cluster(cluster: Cluster, env: Mapping[str, str], detected: DetectedDevices) -> ClusterInfo | None:
    """The cluster that the environment describes; None for a single process."""
    match cluster:
        case Cluster.none:
            return None
        case Cluster.slurm:
            return _slurm(env, detected)
        case Cluster.gke:
            return _jobset(env) if detected.platform is not Platform.tpu else _tpu_pod(env)
        case Cluster.gpu_multiprocess:
            return _gpu_multiprocess(env)
        case Cluster.environment:
            return _environment(env, detected)
        case Cluster.auto:
            return _auto(env, detected)


def _auto(env: Mapping[str, str], detected: DetectedDevices) -> ClusterInfo | None:
    """Try SLURM, then a TPU pod or JobSet, then JAX_* variables; None for a single process."""
    # A batch script has the job's variables too, but only an srun step has several processes.
    if "SLURM_STEP_NODELIST" in env and _number(env, "SLURM_NTASKS", 1) > 1:
        return _slurm(env, detected)
    if detected.platform is Platform.tpu:
        hosts = env.get("TPU_PROCESS_ADDRESSES", env.get("TPU_WORKER_HOSTNAMES"))
        several = "MEGASCALE_COORDINATOR_ADDRESS" in env or (hosts is not None and len(hosts.split(",")) > 1)
        return _tpu_pod(env) if several or hosts is None else None
    if "JOBSET_NAME" in env and "JOB_COMPLETION_INDEX" in env:
        return _jobset(env)
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "COORDINATOR_ADDRESS")
    return _environment(env, detected) if any(name in env for name in names) else None


def _slurm(env: Mapping[str, str], detected: DetectedDevices) -> ClusterInfo:
    """One process per srun task, with the coordinator on the first node; the tasks of a node split its GPUs."""
    [nodes] = _required(env, "SLURM_STEP_NODELIST")
    job, count, index = (_number(env, name) for name in ("SLURM_JOB_ID", "SLURM_NTASKS", "SLURM_PROCID"))
    # node[001-004,007],other -> node001
    host = re.sub(r"^([^,\[]*)(?:\[(\d+)[^\]]*\])?.*", r"\1\2", nodes)
    port = 61440 + (job + _number(env, "SLURM_STEP_ID", 0)) % 4096
    return ClusterInfo(
        seen=f"SLURM job {job}",
        coordinator=env.get("JAX_COORDINATOR_ADDRESS", f"{host}:{port}"),
        count=count,
        index=index,
        local_devices=_local_share(_number(env, "SLURM_LOCALID", 0), _slurm_local_tasks(env), detected.count),
    )


def _slurm_local_tasks(env: Mapping[str, str]) -> int:
    """Tasks on this node, from a list such as 4(x2),1: two nodes with four tasks, then one with one."""
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", env.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    tasks = [int(count) for count, nodes in runs for _ in range(int(nodes or 1))]
    return tasks[_number(env, "SLURM_NODEID", 0)]


def _local_share(rank: int, processes: int, devices: int) -> tuple[int, ...] | None:
    """Devices of this process on its host; None if the launcher has already split them, or there are none."""
    if processes == 1 or devices < processes:
        return None
    count = devices // processes
    return tuple(range(rank * count, (rank + 1) * count))


def _jobset(env: Mapping[str, str]) -> ClusterInfo:
    """Pods of an indexed Job; the coordinator is pod 0 of the first job, which has a DNS name in the JobSet."""
    jobset, job = _required(env, "JOBSET_NAME", "REPLICATED_JOB_NAME")
    # JOB_COMPLETION_INDEX restarts at 0 in each Job.
    first = _number(env, "JOBSET_JOB_INDEX", 0) * _number(env, "JOBSET_PODS_PER_JOB", 0)
    index = _number(env, "JAX_PROCESS_ID") if "JAX_PROCESS_ID" in env else first + _number(env, "JOB_COMPLETION_INDEX")
    return ClusterInfo(
        seen=f"GKE JobSet {jobset}",
        coordinator=env.get("JAX_COORDINATOR_ADDRESS", f"{jobset}-{job}-0-0.{jobset}:{PORT}"),
        count=_number(env, "JAX_NUM_PROCESSES"),
        index=index,
    )


def _tpu_pod(env: Mapping[str, str]) -> ClusterInfo:
    return ClusterInfo(seen=f"TPU pod with workers {env.get('TPU_WORKER_HOSTNAMES', 'from the metadata server')}")


def _gpu_multiprocess(env: Mapping[str, str]) -> ClusterInfo:
    """One process per GPU of this host, started by mpirun, torchrun, srun or a script with the same variables."""
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


def _environment(env: Mapping[str, str], detected: DetectedDevices) -> ClusterInfo:
    """Processes of any launcher that sets JAX_* variables; with the local rank too, those of a host share its GPUs."""
    prefix = "" if "COORDINATOR_ADDRESS" in env else "JAX_"
    [address] = _required(env, f"{prefix}COORDINATOR_ADDRESS", f"{prefix}NUM_PROCESSES", f"{prefix}PROCESS_ID")[:1]
    count, index = _number(env, f"{prefix}NUM_PROCESSES"), _number(env, f"{prefix}PROCESS_ID")
    if not re.search(r":\d+$", address):
        reason = f"{prefix}COORDINATOR_ADDRESS={address} has no port"
        raise ConfigError(Problem(PATH, reason, accepted="host:port, the same for every process"))
    if not 0 <= index < count:
        reason = f"{prefix}PROCESS_ID={index} is out of range for {prefix}NUM_PROCESSES={count}"
        raise ConfigError(Problem(PATH, reason, accepted=f"0 to {count - 1}"))
    devices = None
    if detected.platform is Platform.gpu and all(name in env for name in LOCAL_RANKS[1]):
        rank, processes = (_number(env, name) for name in LOCAL_RANKS[1])
        devices = _local_share(rank, processes, detected.count)
    return ClusterInfo(f"{prefix}COORDINATOR_ADDRESS", address, count, index, devices)


def _required(env: Mapping[str, str], *names: str) -> list[str]:
    """Values of environment variables; ConfigError if one is missing, which lists the others that are set."""
    missing = [name for name in names if name not in env]
    if missing:
        present = ", ".join(f"{name}={env[name]}" for name in names if name in env) or "none of them"
        reason = f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not set"
        hint = f"set: {present}; required: {', '.join(names)}; or run a single process with {PATH}=none"
        raise ConfigError(Problem(PATH, reason, hint=hint))
    return [env[name] for name in names]


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    if default is not None and name not in env:
        return default
    [value] = _required(env, name)
    if not value.isdecimal():
        raise ConfigError(Problem(PATH, f"{name}={value} is not a number", accepted="a whole number"))
    return int(value)


def initialize_distributed(cluster: ClusterInfo, distributed: Distributed, platform: Platform) -> None:
    """Connect to the other processes; ConfigError if they do not all connect in time.

    jax aborts the whole process on its own timeout, so it runs in a thread, with a longer timeout than ours.
    """
    # Its handler of SIGTERM would replace ours, and hide a second SIGTERM.
    jax.config.update("jax_enable_preemption_service", False)
    if platform is Platform.cpu:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        _redirect_native_stdout()
    failure: list[Exception] = []

    def initialize() -> None:
        try:
            jax.distributed.initialize(
                coordinator_address=cluster.coordinator,
                num_processes=cluster.count,
                process_id=cluster.index,
                local_device_ids=cluster.local_devices,
                cluster_detection_method=None if cluster.coordinator is None else "deactivate",
                initialization_timeout=distributed.timeout_seconds + 60,
            )
        except Exception as error:
            failure.append(error)

    thread = threading.Thread(target=initialize, name="jax.distributed", daemon=True)
    thread.start()
    thread.join(distributed.timeout_seconds)
    if thread.is_alive():
        raise ConfigError(_timeout_problem(cluster, distributed.timeout_seconds))
    if failure:
        reason = f"{cluster}: {str(failure[0]).splitlines()[0]}"
        raise ConfigError(Problem(PATH, reason, hint="run a single process with hardware.distributed.cluster=none"))


def _timeout_problem(cluster: ClusterInfo, seconds: int) -> Problem:
    if cluster.index == 0:
        reason = f"not all of the other {(cluster.count or 0) - 1} processes reached {cluster.coordinator}"
    elif cluster.coordinator is not None and not _is_reachable(cluster.coordinator):
        reason = f"process 0 is not reachable at {cluster.coordinator}"
    else:
        reason = "process 0 is reachable, but not all of the other processes connected"
    return Problem(
        "hardware.distributed.timeout_seconds",
        f"{cluster}; {reason} within {seconds} s",
        value=seconds,
        hint="check the other processes' logs, the address and the firewall, or increase the timeout",
    )


def _is_reachable(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=3):
            return True
    except OSError:
        return False


def _redirect_native_stdout() -> None:
    """Send file descriptor 1, to which gloo writes from C++, to stderr, and keep the real stdout for Python."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(stdout, "w", buffering=1, encoding="utf-8")
