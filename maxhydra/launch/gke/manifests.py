"""The objects of a job as plain dicts: functions of the settings and the job, without a cluster.

A JobSet makes a Job for each slice, a Job a pod for each of its nodes, and a headless Service gives every pod a name
that all can resolve. The job's config is a ConfigMap that the JobSet owns. The JobSet is made first, since only then
has it an identity to be owned by; its pods wait until the ConfigMap is there.
"""

import dataclasses
import hashlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from maxhydra.config.errors import show
from maxhydra.config.schema.hardware import Platform
from maxhydra.launch.gke.placement import Placement
from maxhydra.launch.gke.settings import TOLERATION, GkeSettings
from maxhydra.launch.gke.volumes import (
    CONFIG,
    GCSFUSE_ANNOTATION,
    OUTPUTS,
    SHARED_MEMORY,
    is_bucket,
    mount,
    volume,
)

GROUP, VERSION, PLURAL = "jobset.x-k8s.io", "v1alpha2", "jobsets"
SWEEP, NUMBER, RUN = "maxhydra/sweep", "maxhydra/job", "maxhydra/run"
QUEUE = "kueue.x-k8s.io/queue-name"
EXCLUSIVE = {"alpha.jobset.sigs.k8s.io/exclusive-topology": "cloud.google.com/gke-nodepool"}
JOB_INDEX = "jobset.sigs.k8s.io/job-index"
# Names of the JobSet's one kind of Job, and of the container; short, since they become part of every pod's name.
WORKERS, CONTAINER = "w", "worker"
TERMINATION_LOG = "/dev/termination-log"
PORT = 12321
# 128 and the signal, where a run was asked to end, saved, and can go on.
INTERRUPTED = (138, 143)

Manifest = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Work:
    """A job as its pods see it."""

    name: str
    """Of its objects."""
    sweep: str
    number: int
    run: str
    """The run's folder below the outputs."""
    files: Mapping[str, str]
    """What the worker reads: name -> text. The first is its config."""
    placement: Placement


def sweep_id(folder: Path) -> str:
    """A label by which the jobs of a sweep's folder are found, also by a controller that knows only the folder."""
    readable = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:18].rstrip("-")
    digest = hashlib.sha256(str(folder).encode()).hexdigest()[:6]
    return f"{readable}-{digest}".lstrip("-")


def job_name(prefix: str, sweep: str, number: int) -> str:
    """The same for the same job, always: a job cannot be submitted twice."""
    return f"{prefix}-{sweep}-{number}"


def config_map(settings: GkeSettings, work: Work, owner: str | None) -> Manifest:
    """The job's files; `owner` is the JobSet's uid, with which they go away."""
    metadata = _metadata(settings, work)
    if owner is not None:
        reference = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "name": work.name, "uid": owner}
        metadata["ownerReferences"] = [reference]
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "immutable": True, "data": dict(work.files)}


def job_set(settings: GkeSettings, work: Work) -> Manifest:
    metadata = _metadata(settings, work)
    if settings.queue is not None:
        metadata["labels"][QUEUE] = settings.queue
    if _is_exclusive(settings, work.placement):
        metadata["annotations"] |= EXCLUSIVE
    job = {"name": WORKERS, "replicas": work.placement.slices, "template": job_template(settings, work)}
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {
            "maxRestarts": settings.max_restarts,
            # The Jobs' own policy is what tells a pod that was preempted from one that failed.
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


def job_template(settings: GkeSettings, work: Work) -> Manifest:
    """The Job of a slice: all of its pods, or none. Pods are not replaced one by one, since all have to meet."""
    codes = {"containerName": CONTAINER, "operator": "In", "values": list(INTERRUPTED)}
    saved = {"action": "FailJob", "onExitCodes": codes}
    evicted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    pod = {"labels": _labels(work), "annotations": {RUN: work.run}}
    if any(map(is_bucket, [settings.outputs, *settings.volumes.values()])):
        pod["annotations"] |= GCSFUSE_ANNOTATION
    return {
        "spec": {
            "parallelism": work.placement.nodes,
            "completions": work.placement.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,
            "podFailurePolicy": {"rules": [saved, evicted]},
            "template": {"metadata": pod, "spec": _pod(settings, work)},
        }
    }


def _metadata(settings: GkeSettings, work: Work) -> Manifest:
    return {
        "name": work.name,
        "namespace": settings.namespace,
        "labels": _labels(work),
        "annotations": {RUN: work.run},
    }


def _labels(work: Work) -> dict[str, str]:
    return {SWEEP: work.sweep, NUMBER: str(work.number)}


def _is_exclusive(settings: GkeSettings, placement: Placement) -> bool:
    if settings.exclusive is not None:
        return settings.exclusive
    return placement.platform is Platform.tpu and placement.nodes > 1


def _pod(settings: GkeSettings, work: Work) -> Manifest:
    placement = work.placement
    mounts = {OUTPUTS: settings.outputs, **settings.volumes}
    if placement.platform is Platform.gpu:
        # NCCL exchanges more through it than the 64 MB that a container has.
        mounts.setdefault(SHARED_MEMORY, "memory://")
    named = {f"volume-{number}": item for number, item in enumerate(mounts.items())}
    config = {"name": "config", "configMap": {"name": work.name}}
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_seconds,
        "serviceAccountName": settings.service_account,
        "priorityClassName": settings.priority_class,
        "nodeSelector": placement.selector or None,
        "tolerations": [*placement.tolerations, *map(_toleration, settings.tolerations)] or None,
        "containers": [
            _container(settings, work)
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


def _container(settings: GkeSettings, work: Work) -> Manifest:
    chips = {name: str(count) for name, count in work.placement.resources.items()}
    memory = {} if settings.memory is None else {"memory": settings.memory}
    cpu = {} if settings.cpu is None else {"cpu": settings.cpu}
    resources = {"requests": cpu | memory | chips, "limits": memory | chips}
    config = f"{CONFIG}/{next(iter(work.files))}"
    container = {
        "name": CONTAINER,
        "image": settings.image,
        "command": [*settings.command, "job", config, "--run-dir", f"{OUTPUTS}/{work.run}"],
        "env": [*_environment(work), *({"name": key, "value": show(value)} for key, value in settings.env.items())],
        "envFrom": [{"secretRef": {"name": name}} for name in settings.secrets],
        "resources": {kind: amounts for kind, amounts in resources.items() if amounts},
        # How the run ended comes back through here, where nobody can see its folder from outside.
        "terminationMessagePath": TERMINATION_LOG,
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    return {key: value for key, value in container.items() if value}


def _environment(work: Work) -> list[Manifest]:
    """How the processes meet, besides what GKE itself tells those on TPUs, and where to say how the run ended."""
    values = {"PYTHONUNBUFFERED": "1", "MAXHYDRA_TERMINATION_LOG": TERMINATION_LOG}
    if work.placement.processes == 1 or work.placement.platform is Platform.tpu:
        return [{"name": name, "value": value} for name, value in values.items()]
    values |= {
        "JOBSET_NAME": work.name,
        "REPLICATED_JOB_NAME": WORKERS,
        "JAX_COORDINATOR_ADDRESS": f"{work.name}-{WORKERS}-0-0.{work.name}:{PORT}",
        "JAX_NUM_PROCESSES": str(work.placement.processes),
        "JOBSET_PODS_PER_JOB": str(work.placement.nodes),
    }
    index = {"name": "JOBSET_JOB_INDEX", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{JOB_INDEX}']"}}}
    return [*({"name": name, "value": value} for name, value in values.items()), index]


def _toleration(text: str) -> Manifest:
    found = re.fullmatch(TOLERATION, text)
    assert found is not None, text
    toleration = {"key": found["key"], "operator": "Exists" if found["value"] is None else "Equal"}
    optional = {"value": found["value"], "effect": found["effect"]}
    return toleration | {name: value for name, value in optional.items() if value is not None}


class _Readable(yaml.SafeDumper):
    """Texts of several lines are written as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Readable.add_representer(str, _text)


def to_yaml(documents: Sequence[Manifest]) -> str:
    """As kubectl takes them."""
    return yaml.dump_all(documents, Dumper=_Readable, sort_keys=False, width=120, explicit_start=True)
