"""Kubernetes objects of a job as plain dicts: pure functions of the settings and the job.

A JobSet creates one Job per slice, a Job one pod per node, and a headless Service gives every pod a DNS name. The job's
config is a ConfigMap owned by the JobSet. The JobSet is created first, because the owner reference needs its uid; its
pods wait until the ConfigMap exists.

`Placement`, the node labels and resources of a job, comes from the hardware option and the launcher settings.
"""

import dataclasses
import hashlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config.errors import ConfigError, Problem, show
from maxhydra.config.schema.hardware import Cluster, Hardware, Platform
from maxhydra.launch.base import KEY
from maxhydra.launch.gke.settings import (
    CONFIG,
    GCSFUSE_ANNOTATION,
    OUTPUTS,
    SHARED_MEMORY,
    TOLERATION,
    GkeSettings,
    is_bucket,
    is_pod_local,
    mount,
    volume,
)

RESOURCES = {Platform.tpu: "google.com/tpu", Platform.gpu: "nvidia.com/gpu"}
LABELS = {Platform.tpu: "cloud.google.com/gke-tpu-accelerator", Platform.gpu: "cloud.google.com/gke-accelerator"}
TOPOLOGY = "cloud.google.com/gke-tpu-topology"


@dataclasses.dataclass(frozen=True)
class Placement:
    """Nodes and chips that a job requests."""

    platform: Platform
    slices: int
    nodes: int
    """Per slice; one process per node."""
    chips: int
    """Per node; 0 on CPU."""
    selector: dict[str, str]
    """Node labels."""

    @property
    def processes(self) -> int:
        return self.slices * self.nodes

    @property
    def resources(self) -> dict[str, int]:
        return {RESOURCES[self.platform]: self.chips} if self.chips else {}

    @property
    def tolerations(self) -> list[dict[str, Any]]:
        """Tolerations for the taints that keep other pods off accelerator nodes."""
        return [{"key": name, "operator": "Exists", "effect": "NoSchedule"} for name in self.resources]


def choose_placement(settings: GkeSettings, hardware: Hardware) -> Placement:
    """Compute the placement. Raises ConfigError if the settings do not fit the hardware."""
    if problems := list(_problems(settings, hardware)):
        raise ConfigError(problems)
    placement = _placement(settings, hardware)
    if placement.processes > 1 and (problems := list(_multi_process_problems(settings, hardware))):
        raise ConfigError(problems)
    return placement


def _placement(settings: GkeSettings, hardware: Hardware) -> Placement:
    nodes, chips, labels = settings.nodes, 0, {}
    if hardware.platform is not Platform.cpu:
        assert hardware.gke.accelerator is not None
        labels[LABELS[hardware.platform]] = hardware.gke.accelerator
        chips = settings.chips_per_node or hardware.gke.chips_per_node
    if settings.topology is not None:
        total = _chips(settings.topology)
        chips = total if total <= hardware.gke.one_node_chips else hardware.gke.chips_per_node
        nodes = total // chips
        labels[TOPOLOGY] = settings.topology
    return Placement(hardware.platform, settings.slices, nodes, chips, labels | settings.node_selector)


def _problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    platform = hardware.platform
    if platform is Platform.auto:
        hint = "list the options with maxhydra explain hardware"
        reason = "must name the hardware, because it selects the nodes"
        yield Problem("hardware", reason, "auto", "tpu-v5e, gpu-h100, cpu, ...", hint)
        return
    if platform is not Platform.cpu and hardware.gke.accelerator is None:
        yield Problem("hardware.gke.accelerator", "is unknown", hint="see the node labels in kubectl describe node")
    if platform is Platform.tpu:
        yield from _slice_problems(settings, hardware)
        misplaced = {"nodes": settings.nodes != 1, "chips_per_node": settings.chips_per_node is not None}
        reason = f"is determined by {KEY}.topology on TPU"
    else:
        misplaced = {"topology": settings.topology is not None}
        misplaced["chips_per_node"] = platform is Platform.cpu and settings.chips_per_node is not None
        reason = f"has no effect with hardware.platform={platform.value}"
    for name in (name for name, is_misplaced in misplaced.items() if is_misplaced):
        yield Problem(f"{KEY}.{name}", reason, getattr(settings, name))


def _multi_process_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    """Problems of a job with several processes, which form a cluster and write one checkpoint."""
    if hardware.distributed.cluster is Cluster.none:
        reason = "disables multi-process initialization, but the job has several processes"
        yield Problem("hardware.distributed.cluster", reason, Cluster.none, "auto")
    if is_pod_local(settings.outputs):
        reason = "is local to each pod, but the pods of a job write one checkpoint together"
        yield Problem(f"{KEY}.outputs", reason, settings.outputs, "gs://bucket/folder, pvc://claim/folder")


def _slice_problems(settings: GkeSettings, hardware: Hardware) -> Iterator[Problem]:
    facts, topology = hardware.gke, settings.topology
    example = "x".join(["4"] * facts.dimensions)
    if topology is None:
        yield Problem(f"{KEY}.topology", "is required for a TPU", accepted=f"such as {example}")
    elif topology.count("x") + 1 != facts.dimensions:
        reason = f"is not a slice shape of {facts.accelerator}"
        yield Problem(f"{KEY}.topology", reason, topology, f"{facts.dimensions} numbers, such as {example}")
    elif _chips(topology) > facts.one_node_chips and _chips(topology) % facts.chips_per_node:
        reason = f"has {_chips(topology)} chips, but a node of {facts.accelerator} has {facts.chips_per_node}"
        yield Problem(f"{KEY}.topology", reason, topology, f"a multiple, such as {example}")


def _chips(topology: str) -> int:
    return math.prod(int(size) for size in topology.split("x"))


GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
SWEEP, NUMBER, RUN = "maxhydra/sweep", "maxhydra/job", "maxhydra/run"
QUEUE = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
# Names of the replicated Job and of the container; short, because they become part of every pod's name.
WORKERS, CONTAINER = "w", "worker"
TERMINATION_LOG = "/dev/termination-log"
PORT = 12321
# 128 + SIGUSR1 or SIGTERM: the run was asked to stop, saved a checkpoint, and can be resumed.
# 75: another process of the run is lost (runtime/peers.py).
RESUMABLE_EXIT_CODES = (75, 138, 143)

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class JobDescription:
    """Parameters of a job's objects."""

    name: str
    """Name of the JobSet and of the ConfigMap."""
    sweep: str
    number: int
    run: str
    """Run folder below the outputs."""
    files: Mapping[str, str]
    """Files that the worker reads: name -> text. The first is its config."""
    placement: Placement


def sweep_id(folder: Path) -> str:
    """Label value of a sweep. Derived from the folder alone, so any controller can find the sweep's jobs."""
    readable = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:18].rstrip("-")
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    return f"{readable}-{digest}".lstrip("-")


def job_name(prefix: str, sweep: str, number: int) -> str:
    """Deterministic name of a job, so that it cannot be submitted twice."""
    return f"{prefix}-{sweep}-{number}"


def config_map_manifest(settings: GkeSettings, description: JobDescription, owner: str | None) -> Manifest:
    """ConfigMap with the job's files; `owner` is the JobSet's uid, with which it is garbage-collected."""
    metadata = _metadata(settings, description)
    if owner is not None:
        reference = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "name": description.name, "uid": owner}
        metadata["ownerReferences"] = [reference]
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": dict(description.files),
    }


def job_set_manifest(settings: GkeSettings, description: JobDescription) -> Manifest:
    metadata = _metadata(settings, description)
    if settings.queue is not None:
        metadata["labels"][QUEUE] = settings.queue
    if _is_exclusive(settings, description.placement):
        metadata["annotations"] |= EXCLUSIVE
    job = {"name": WORKERS, "replicas": description.placement.slices, "template": job_template(settings, description)}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {
            "maxRestarts": settings.max_restarts,
            # The Jobs' podFailurePolicy distinguishes preempted pods from failed ones.
            "rules": [
                {
                    "name": "preempted",
                    "action": "RestartJobSetAndIgnoreMaxRestarts",
                    "onJobFailureReasons": ["PodFailurePolicy"],
                }
            ],
        },
        "replicatedJobs": [job],
    }
    if settings.ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = settings.ttl_seconds
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": metadata, "spec": spec}


def job_template(settings: GkeSettings, description: JobDescription) -> Manifest:
    """Job of a slice. Pods are never replaced one by one, since all processes must initialize together."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(RESUMABLE_EXIT_CODES)}
    saved = {"action": "FailJob", "onExitCodes": codes}
    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    pod = {"labels": _labels(description), "annotations": {RUN: description.run}}
    if any(map(is_bucket, [settings.outputs, *settings.volumes.values()])):
        pod["annotations"] |= GCSFUSE_ANNOTATION
    return {
        "spec": {
            "parallelism": description.placement.nodes,
            "completions": description.placement.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [saved, evicted]},
            "template": {"metadata": pod, "spec": _pod(settings, description)},
        }
    }


def _metadata(settings: GkeSettings, description: JobDescription) -> Manifest:
    return {
        "name": description.name,
        "namespace": settings.namespace,
        "labels": _labels(description),
        "annotations": {RUN: description.run},
    }


def _labels(description: JobDescription) -> dict[str, str]:
    return {SWEEP: description.sweep, NUMBER: str(description.number)}


def _is_exclusive(settings: GkeSettings, placement: Placement) -> bool:
    if settings.exclusive is not None:
        return settings.exclusive
    return placement.platform is Platform.tpu and placement.nodes > 1


def _pod(settings: GkeSettings, description: JobDescription) -> Manifest:
    placement = description.placement
    mounts = {OUTPUTS: settings.outputs, **settings.volumes}
    if placement.platform is Platform.gpu:
        # NCCL needs more shared memory than the container default of 64 MB.
        mounts.setdefault(SHARED_MEMORY, "memory://")
    named = {f"volume-{number}": item for number, item in enumerate(mounts.items())}
    config = {"name": "config", "configMap": {"name": description.name}}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "nodeSelector": placement.selector or None,
        "tolerations": [*placement.tolerations, *map(_toleration, settings.tolerations)] or None,
        "containers": [
            _container(settings, description)
            | {
                "volumeMounts": [
                    {"name": "config", "mountPath": CONFIG, "readOnly": True},
                    *(mount(name, path, source) for name, (path, source) in named.items()),
                ]
            }
        ],
        "volumes": [config, *(volume(name, source) for name, (_, source) in named.items())],
    }
    return {key: value for key, value in spec.items() if value is not None}


def _container(settings: GkeSettings, description: JobDescription) -> Manifest:
    chips = {name: str(count) for name, count in description.placement.resources.items()}
    memory = {} if settings.memory is None else {"memory": settings.memory}
    cpu = {} if settings.cpu is None else {"cpu": settings.cpu}
    resources = {"requests": cpu | memory | chips, "limits": memory | chips}
    config = f"{CONFIG}/{next(iter(description.files))}"
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [*settings.command, "job", config, "--run-dir", f"{OUTPUTS}/{description.run}"],
        "env": [
            *_environment(description),
            *({"name": key, "value": show(value)} for key, value in settings.env.items()),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        # Carries the run's result to launchers that cannot see the run folder.
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {key: value for key, value in container.items() if value}


def _environment(description: JobDescription) -> list[Manifest]:
    """JAX cluster variables (on TPU, GKE sets its own), and the path of the termination message."""
    values = {"PYTHONUNBUFFERED": "1", "MAXHYDRA_TERMINATION_LOG": TERMINATION_LOG}
    if description.placement.processes == 1 or description.placement.platform is Platform.tpu:
        return [{"name": name, "value": value} for name, value in values.items()]
    values |= {
        "JOBSET_NAME": description.name,
        "REPLICATED_JOB_NAME": WORKERS,
        "JAX_COORDINATOR_ADDRESS": f"{description.name}-{WORKERS}-0-0.{description.name}:{PORT}",
        "JAX_NUM_PROCESSES": str(description.placement.processes),
        "JOBSET_PODS_PER_JOB": str(description.placement.nodes),
    }
    index = {"name": "JOBSET_JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_INDEX}']"}}}
    return [*({"name": name, "value": value} for name, value in values.items()), index]


def _toleration(text: str) -> Manifest:
    match = re.fullmatch(TOLERATION, text)
    assert match is not None, text
    toleration = {"key": match["key"], "operator": "Exists" if match["value"] is None else "Equal"}
    optional = {"value": match["value"], "effect": match["effect"]}
    return toleration | {name: value for name, value in optional.items() if value is not None}


class _BlockStyleDumper(yaml.SafeDumper):
    """Writes multi-line strings in block style."""


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_BlockStyleDumper.add_representer(str, _represent_text)


def to_yaml(documents: Sequence[Manifest]) -> str:
    """Multi-document YAML for kubectl apply."""
    return yaml.dump_all(documents, Dumper=_BlockStyleDumper, sort_keys=False, width=120, explicit_start=True)
