"""Settings of hydra/launcher=gke, with the Kubernetes naming rules that their values must follow.

Volumes of a pod are URLs: gs://bucket/folder, pvc://claim/folder, host:///folder, empty://, memory://.
"""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.base import KEY, LauncherSettings, choice_problems, minimum_problems, pattern_problems
from maxhydra.record.redact import is_secret, is_secret_name, redact_text

OUTPUTS = "/outputs"
CONFIG = "/etc/maxhydra"
SHARED_MEMORY = "/dev/shm"
RESERVED = (OUTPUTS, CONFIG)
SOURCES = "gs://bucket/folder, pvc://claim/folder, host:///folder, empty:// (pod-local), memory:// (tmpfs)"

_FOLDER = r"(?:/(?!(?:.*/)?\.\.(?:/|$))(?P<folder>[^\s,]*))?"
_URL_PATTERNS = {
    "gs": re.compile(rf"gs://(?P<name>[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]){_FOLDER}"),
    "pvc": re.compile(rf"pvc://(?P<name>[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?){_FOLDER}"),
    "host": re.compile(rf"host://(?P<name>){_FOLDER}"),
    "empty": re.compile(r"empty://(?P<name>)(?P<folder>)"),
    "memory": re.compile(r"memory://(?P<name>)(?P<folder>)"),
}
GCSFUSE = "gcsfuse.csi.storage.gke.io"
# Annotation that makes GKE inject the Cloud Storage FUSE sidecar.
GCSFUSE_ANNOTATION = {"gke-gcsfuse/volumes": "true"}


def is_source(text: str) -> bool:
    scheme = text.partition(":")[0]
    return scheme in _URL_PATTERNS and _URL_PATTERNS[scheme].fullmatch(text) is not None


def is_bucket(source: str) -> bool:
    return source.startswith("gs:")


def is_pod_local(source: str) -> bool:
    """True if the volume lives and dies with its pod and is not visible to other pods."""
    return source.startswith(("empty:", "memory:"))


def volume(name: str, source: str) -> dict[str, Any]:
    """An entry of a pod's `volumes`."""
    scheme, target, folder = _parse(source)
    match scheme:
        case "gs":
            options = ["implicit-dirs", *([f"only-dir={folder}"] if folder else [])]
            attributes = {"bucketName": target, "mountOptions": ",".join(options)}
            return {"name": name, "csi": {"driver": GCSFUSE, "volumeAttributes": attributes}}
        case "pvc":
            return {"name": name, "persistentVolumeClaim": {"claimName": target}}
        case "host":
            return {"name": name, "hostPath": {"path": f"/{folder}", "type": "DirectoryOrCreate"}}
        case "memory":
            return {"name": name, "emptyDir": {"medium": "Memory"}}
        case _:
            return {"name": name, "emptyDir": {}}


def mount(name: str, path: str, source: str) -> dict[str, Any]:
    """An entry of a container's `volumeMounts`."""
    scheme, _, folder = _parse(source)
    sub_path = {"subPath": folder} if scheme == "pvc" and folder else {}
    return {"name": name, "mountPath": path, **sub_path}


def _parse(source: str) -> tuple[str, str, str]:
    scheme = source.partition(":")[0]
    match = _URL_PATTERNS[scheme].fullmatch(source)
    assert match is not None, source
    return scheme, match["name"], (match["folder"] or "").strip("/")


LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
# The JobSet's headless Service has its name, which must start with a letter; 15 characters leave space for the suffix.
PREFIX = r"[a-z](?:[-a-z0-9]{0,13}[a-z0-9])?"
SUBDOMAIN = rf"(?=[^/]{{1,253}}(?:/|$)){LABEL}(?:\.{LABEL})*"
QUALIFIED = rf"(?:{SUBDOMAIN}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
LABEL_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
QUANTITY = r"\d+(?:\.\d+)?(?:[numkMGTPE]|[KMGTPE]i|[eE]\d+)?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
# Name of the container that runs the job.
WORKER = "worker"
SECRET = rf"{SUBDOMAIN}|{VARIABLE}=(?:{SUBDOMAIN})/[-._a-zA-Z0-9]{{1,253}}"
TOLERATION = (
    rf"(?P<key>{QUALIFIED})(?:=(?P<value>{LABEL_VALUE}))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
NAME_RULE = "lowercase letters, digits and dashes"

# Field -> (regex, description), checked if the field is set.
PATTERNS = {
    "image": (r"[^\s@:/][^\s]*", "an image with its registry, such as us-docker.pkg.dev/project/repository/maxhydra:1"),
    "namespace": (LABEL, f"{NAME_RULE}, up to 63"),
    "context": (r"\S+", "a context of the kubeconfig; list them with kubectl config get-contexts"),
    "topology": (r"[1-9]\d*(x[1-9]\d*){1,2}", "chips per dimension of a slice, such as 4x4 or 2x2x4"),
    "cpu": (QUANTITY, "a Kubernetes quantity, such as 8 or 500m"),
    "memory": (QUANTITY, "a Kubernetes quantity, such as 64Gi"),
    "queue": (LABEL, f"a LocalQueue of the namespace: {NAME_RULE}, up to 63"),
    "priority_class": (SUBDOMAIN, f"{NAME_RULE} and dots"),
    "service_account": (SUBDOMAIN, f"{NAME_RULE} and dots"),
    "code": (r"[-\w./~^]+", "a git revision: a commit, a tag, a branch or HEAD"),
    "prefix": (PREFIX, f"{NAME_RULE}, starting with a letter, up to 15"),
}
MINIMUMS = {"slices": 1, "nodes": 1, "max_restarts": 0, "grace_seconds": 1}
# Minimums of fields that may be null.
OPTIONAL_MINIMUMS = {"chips_per_node": 1, "ttl_seconds": 0}
LISTS, MAPPINGS, SWITCHES = (
    ("secrets", "tolerations", "command"),
    ("env", "volumes", "node_selector", "pod_patch"),
    ("detach", "exclusive"),
)
# Fields of the above that may be null.
OPTIONAL = ("exclusive", "node_selector")
CHOICES = {"workload": ("jobset", "job"), "network": ("default", "tcpx", "tcpxo", "rdma")}


@dataclasses.dataclass(frozen=True)
class GkeSettings(LauncherSettings):
    """hydra.launcher with hydra/launcher=gke: one JobSet or Job per job."""

    kind: ClassVar[str] = "gke"

    image: str = ""
    """Container image with maxhydra, including registry and tag. Required."""
    outputs: str = ""
    """Output volume: gs://bucket/folder, pvc://claim/folder, host:///folder, or empty:// to discard outputs. Required.
    Submitting the same sweep with the same outputs resumes from the checkpoints there."""
    namespace: str = "default"
    """Namespace of the objects."""
    context: str | None = None
    """Context of the kubeconfig. null: the current context, or the pod's service account inside a cluster."""
    topology: str | None = None
    """TPU: chips of a slice, such as 4x4 or 2x2x4. The hardware option determines the number of nodes."""
    slices: int = 1
    """TPU slices (or groups of nodes) per job."""
    nodes: int = 1
    """GPU, CPU: nodes per slice, with one process each."""
    chips_per_node: int | None = None
    """GPU: chips requested per node. null: all that the hardware option declares."""
    exclusive: bool | None = None
    """Give each slice a separate node pool. null: true for multi-host TPU slices, which are one node pool each."""
    cpu: str | None = None
    """CPU request per node, such as 8. null: no request."""
    memory: str | None = None
    """Memory request and limit per node, such as 64Gi. null: neither."""
    queue: str | None = None
    """Kueue LocalQueue for the jobs."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    service_account: str | None = None
    """Kubernetes service account of the pods, which grants access to buckets."""
    secrets: tuple[str, ...] = ()
    """Secrets by reference: the name of one, whose keys become environment variables, or VARIABLE=name/key for one of
    its keys. The values never pass through the launcher."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that are not secret."""
    volumes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Mount path in the pod -> gs://bucket/folder, pvc://claim/folder, host:///folder, empty://, or memory://."""
    node_selector: dict[str, str | None] | None = dataclasses.field(default_factory=dict)
    """Required node labels, in addition to those of the hardware option. A label with the value null is removed; null
    instead of a mapping removes all, for clusters without GKE's labels."""
    tolerations: tuple[str, ...] = ()
    """Tolerated taints: key, key=value, key=value:NoSchedule."""
    command: tuple[str, ...] = ("python", "-m", "maxhydra")
    """Command that runs maxhydra in the image."""
    max_restarts: int = 3
    """Restarts of a failed job. Preempted jobs are always restarted."""
    grace_seconds: int = 60
    """Seconds from SIGTERM to SIGKILL, in which a run saves a checkpoint. Spot nodes allow 25 at most."""
    ttl_seconds: int | None = 7 * 86400
    """Seconds after which a finished job is deleted from the cluster. null: never."""
    workload: str = "jobset"
    """jobset, or job: a plain Job, for clusters without the JobSet controller and jobs of one process."""
    network: str = "default"
    """GPU network between nodes of GKE: default, tcpx (A3 High), tcpxo (A3 Mega) or rdma (A3 Ultra, A4), with its
    interfaces, sidecar, volumes and NCCL variables."""
    pod_patch: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Merged into the pod template, {metadata: ..., spec: ...}: null removes a key, lists of named items (containers,
    volumes, env) are merged by name, other lists are replaced."""
    code: str | None = None
    """Git revision that the image was built from. The changes of this checkout since then, committed or not, are sent
    with the job and applied when its pods start. null: the code of the image."""
    prefix: str = "maxhydra"
    """Name prefix of the objects."""
    detach: bool = False
    """Submit and return. `maxhydra sweep resume` monitors the jobs later."""

    @property
    def detached(self) -> bool:
        return self.detach

    def problems(self) -> Iterator[Problem]:
        if type_problems := list(self._type_problems()):
            yield from type_problems
            return
        required = {"image": PATTERNS["image"][1], "outputs": SOURCES}
        yield from (
            Problem(f"{KEY}.{name}", "is required", accepted=description)
            for name, description in required.items()
            if not getattr(self, name)
        )
        yield from pattern_problems(self, {name: rule for name, rule in PATTERNS.items() if getattr(self, name) != ""})
        yield from minimum_problems(self, MINIMUMS)
        optional = {name: least for name, least in OPTIONAL_MINIMUMS.items() if getattr(self, name) is not None}
        yield from minimum_problems(self, optional)
        yield from choice_problems(self, CHOICES)
        yield from self._volume_problems()
        yield from self._list_problems()
        yield from self._patch_problems()

    def _type_problems(self) -> Iterator[Problem]:
        for names, kind, example in (
            (LISTS, tuple, "[a,b]"),
            (MAPPINGS, dict, "{key:value}"),
            (SWITCHES, bool, "true, false"),
        ):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) and not (name in OPTIONAL and value is None):
                    yield Problem(f"{KEY}.{name}", "has the wrong type", value, example)

    def _volume_problems(self) -> Iterator[Problem]:
        """Problems of `outputs` and `volumes`."""
        sources = [(f"{KEY}.volumes.{mount}", source) for mount, source in self.volumes.items()]
        sources += [(f"{KEY}.outputs", self.outputs)] if self.outputs else []
        yield from (
            Problem(path, "is not a supported volume URL", source, SOURCES)
            for path, source in sources
            if not is_source(str(source))
        )
        for mount in self.volumes:
            if not re.fullmatch(r"(/[\w.-]+)+", mount) or mount in RESERVED:
                accepted = f"an absolute path other than {' and '.join(RESERVED)}"
                yield Problem(f"{KEY}.volumes", "has an invalid mount path", mount, accepted)

    def _list_problems(self) -> Iterator[Problem]:
        if not self.command:
            yield Problem(f"{KEY}.command", "is empty", accepted="[python,-m,maxhydra]")
        yield from _item_problems("secrets", self.secrets, SECRET, "the name of a Secret, or VARIABLE=name/key")
        yield from _item_problems("env", self.env, VARIABLE, "letters, digits and _, not starting with a digit")
        labels = self.node_selector or {}
        yield from _item_problems("node_selector", labels, QUALIFIED, "a label, such as example.com/pool")
        values = [value for value in labels.values() if value is not None]
        yield from _item_problems("node_selector", values, LABEL_VALUE, "a label value")
        yield from _item_problems("tolerations", self.tolerations, TOLERATION, "key, key=value, key=value:NoSchedule")
        for name, value in self.env.items():
            if is_secret_name(name) or is_secret(name, str(value)):
                hint = f"kubectl create secret generic NAME --from-literal={name}=..., and {KEY}.secrets=[NAME]"
                reason = "looks like a secret, and JobSets are not confidential"
                yield Problem(f"{KEY}.env.{name}", reason, hint=hint)

    def _patch_problems(self) -> Iterator[Problem]:
        path, accepted = f"{KEY}.pod_patch", "{metadata: {...}, spec: {...}}"
        for name, value in self.pod_patch.items():
            if name not in ("metadata", "spec") or not isinstance(value, dict):
                yield Problem(path, f"has {name!r}, which is not a mapping of a pod template", value, accepted)
        spec = self.pod_patch.get("spec")
        containers = spec.get("containers", []) if isinstance(spec, dict) else []
        if not isinstance(containers, list) or not all(
            isinstance(item, dict) and item.get("name") for item in containers
        ):
            reason = "has containers without a name, by which they are merged"
            yield Problem(path, reason, containers, f"[{{name: {WORKER}, ...}}]")
        for name in _secrets_in(self.pod_patch, path):
            yield Problem(name, "looks like a secret, and manifests are not confidential", hint=f"use {KEY}.secrets")


def _secrets_in(values: Any, path: str) -> Iterator[str]:
    """Yield the paths of secrets: variables whose name or value is that of one, and texts that contain one."""
    if isinstance(values, dict):
        if "value" in values and (is_secret_name(str(values.get("name"))) or is_secret("", str(values["value"]))):
            yield f"{path}.{values.get('name')}"
        for key, value in values.items():
            yield from _secrets_in(value, f"{path}.{key}")
    elif isinstance(values, list):
        for item in values:
            yield from _secrets_in(item, path)
    elif isinstance(values, str) and redact_text(values) != values:
        yield path


def _item_problems(name: str, values: Iterable[object], pattern: str, description: str) -> Iterator[Problem]:
    for value in values:
        if not re.fullmatch(pattern, str(value)):
            yield Problem(f"{KEY}.{name}", "is malformed", value, description)
