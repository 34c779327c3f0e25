"""Kubernetes objects of a job as plain dicts: pure functions of the settings and the job.

A JobSet creates one Job per slice, a Job one pod per node, and a headless Service gives every pod a DNS name. The job's
config is a ConfigMap owned by the JobSet. The JobSet is created first, because the owner reference needs its uid; its
pods wait until the ConfigMap exists.
"""

import base64
import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config.errors import show
from maxhydra.config.schema.hardware import Platform
from maxhydra.launch.gke.code import PATCH, Code, init_container, mount_code
from maxhydra.launch.gke.networking import merge_patch, network_patch
from maxhydra.launch.gke.placement import Placement
from maxhydra.launch.gke.settings import (
    CONFIG,
    GCSFUSE_ANNOTATION,
    OUTPUTS,
    SHARED_MEMORY,
    TOLERATION,
    WORKER,
    GkeSettings,
    is_bucket,
    mount,
    volume,
)
from maxhydra.record.metrics import STREAM


@dataclasses.dataclass(frozen=True)
class Workload:
    """A kind of Kubernetes object that runs the pods of a job."""

    kind: str
    group: str
    version: str
    plural: str
    pod_label: str
    """Label of its pods, whose value is its name."""
    complete: str
    """Condition of success; that of failure is `Failed`."""

    @property
    def api_version(self) -> str:
        return f"{self.group}/{self.version}"


WORKLOADS = {
    "jobset": Workload(
        "JobSet", "jobset.x-k8s.io", "v1alpha2", "jobsets", "jobset.sigs.k8s.io/jobset-name", "Completed"
    ),
    "job": Workload("Job", "batch", "v1", "jobs", "job-name", "Complete"),
}
SWEEP, NUMBER, RUN = "maxhydra/sweep", "maxhydra/job", "maxhydra/run"
QUEUE = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
# Name of the replicated Job; short, because it becomes part of every pod's name.
WORKERS = "w"
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
    code: Code | None = None
    """Changes to the code of the image."""


def sweep_id(folder: Path) -> str:
    """Label value of a sweep. Derived from the folder alone, so any controller can find the sweep's jobs."""
    readable = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:18].rstrip("-")
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    return f"{readable}-{digest}".lstrip("-")


def job_name(prefix: str, sweep: str, number: int) -> str:
    """Deterministic name of a job, so that it cannot be submitted twice."""
    return f"{prefix}-{sweep}-{number}"


def config_map_manifest(settings: GkeSettings, description: JobDescription, owner: str | None) -> Manifest:
    """ConfigMap with the job's files; `owner` is the uid of the JobSet or Job, with which it is garbage-collected."""
    metadata, workload = _metadata(settings, description), WORKLOADS[settings.workload]
    if owner is not None:
        reference = {"apiVersion": workload.api_version, "kind": workload.kind}
        metadata["ownerReferences"] = [reference | {"name": description.name, "uid": owner}]
    code = description.code
    binary = {} if code is None else {"binaryData": {PATCH: base64.b64encode(code.patch).decode()}}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "immutable": True,
        "data": dict(description.files),
        **binary,
    }


def workload_manifest(settings: GkeSettings, description: JobDescription) -> Manifest:
    """The JobSet or Job that runs the job."""
    return (job_manifest if settings.workload == "job" else job_set_manifest)(settings, description)


def job_manifest(settings: GkeSettings, description: JobDescription) -> Manifest:
    """A plain Job of one pod, which is replaced after a preemption without counting it as a failure."""
    template = job_template(settings, description)["spec"]
    rules = [{**rule, "action": "Ignore"} for rule in template["podFailurePolicy"]["rules"]]
    spec = template | {"completionMode": "NonIndexed", "backoffLimit": settings.max_restarts}
    spec["podFailurePolicy"] = {"rules": rules}
    if settings.ttl_seconds is not None:
        spec["ttlSecondsAfterFinished"] = settings.ttl_seconds
    metadata = _workload_metadata(settings, description)
    return {"apiVersion": WORKLOADS["job"].api_version, "kind": "Job", "metadata": metadata, "spec": spec}


def job_set_manifest(settings: GkeSettings, description: JobDescription) -> Manifest:
    metadata = _workload_metadata(settings, description)
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
    return {"apiVersion": WORKLOADS["jobset"].api_version, "kind": "JobSet", "metadata": metadata, "spec": spec}


def job_template(settings: GkeSettings, description: JobDescription) -> Manifest:
    """Job of a slice. Pods are never replaced one by one, since all processes must initialize together."""
    codes = {"containerName": WORKER, "operator": "In", "values": list(RESUMABLE_EXIT_CODES)}
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
            "template": _patched({"metadata": pod, "spec": _pod(settings, description)}, settings),
        }
    }


def _patched(template: Manifest, settings: GkeSettings) -> Manifest:
    """Apply the GPU network and the user's patch, in this order, to a pod template."""
    (worker,) = template["spec"]["containers"]
    network = network_patch(settings.network, worker, given=settings.env)
    return merge_patch(merge_patch(template, network), settings.pod_patch)


def _metadata(settings: GkeSettings, description: JobDescription) -> Manifest:
    return {
        "name": description.name,
        "namespace": settings.namespace,
        "labels": _labels(description),
        "annotations": {RUN: description.run},
    }


def _workload_metadata(settings: GkeSettings, description: JobDescription) -> Manifest:
    metadata = _metadata(settings, description)
    if settings.queue is not None:
        metadata["labels"][QUEUE] = settings.queue
    return metadata


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
    code = description.code
    volumes = [config, *(volume(name, source) for name, (_, source) in named.items())]
    container = _container(settings, description)
    container["volumeMounts"] = [
        {"name": "config", "mountPath": CONFIG, "readOnly": True},
        *(mount(name, path, source) for name, (path, source) in named.items()),
    ]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "nodeSelector": placement.selector or None,
        "tolerations": [*placement.tolerations, *map(_toleration, settings.tolerations)] or None,
        "initContainers": None if code is None else [init_container(code, settings.image)],
        "containers": [container if code is None else mount_code(container)],
        "volumes": [*volumes, {"name": "code", "emptyDir": {}}] if code is not None else volumes,
    }
    return {key: value for key, value in spec.items() if value is not None}


def _container(settings: GkeSettings, description: JobDescription) -> Manifest:
    chips = {name: str(count) for name, count in description.placement.resources.items()}
    memory = {} if settings.memory is None else {"memory": settings.memory}
    cpu = {} if settings.cpu is None else {"cpu": settings.cpu}
    resources = {"requests": cpu | memory | chips, "limits": memory | chips}
    config = f"{CONFIG}/{next(iter(description.files))}"
    container = {
        "name": WORKER,
        "image": settings.image,
        "command": [*settings.command, "job", config, "--run-dir", f"{OUTPUTS}/{description.run}"],
        "env": [
            *_environment(description),
            *({"name": key, "value": show(value)} for key, value in settings.env.items()),
            *(_secret_variable(entry) for entry in settings.secrets if "=" in entry),
        ],
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets if "=" not in name],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        # Carries the run's result to launchers that cannot see the run folder.
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {key: value for key, value in container.items() if value}


def _secret_variable(entry: str) -> Manifest:
    """A variable from one key of a Secret: VARIABLE=secret/key."""
    variable, _, reference = entry.partition("=")
    secret, _, key = reference.partition("/")
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key}}}


def _environment(description: JobDescription) -> list[Manifest]:
    """JAX cluster variables (on TPU, GKE sets its own), and the path of the termination message."""
    values = {"PYTHONUNBUFFERED": "1", "MAXHYDRA_TERMINATION_LOG": TERMINATION_LOG, STREAM: "1"}
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
