"""hydra.launcher for hydra/launcher=gke, and every rule of Kubernetes that its values can break."""

import dataclasses
import re
from collections.abc import Iterable, Iterator
from typing import ClassVar

from maxhydra.config.errors import Problem
from maxhydra.launch.gke.volumes import RESERVED, SOURCES, is_source
from maxhydra.launch.settings import KEY, LauncherSettings, out_of_range, unlike
from maxhydra.record.redact import is_secret_name

LABEL = r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?"
# A Service, which a JobSet has in its own name, may not begin with a digit; 15 characters leave room for the rest.
PREFIX = r"[a-z](?:[-a-z0-9]{0,13}[a-z0-9])?"
SUBDOMAIN = rf"(?=[^/]{{1,253}}(?:/|$)){LABEL}(?:\.{LABEL})*"
QUALIFIED = rf"(?:{SUBDOMAIN}/)?[A-Za-z0-9](?:[-A-Za-z0-9_.]{{0,61}}[A-Za-z0-9])?"
LABEL_VALUE = r"(?:[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?"
QUANTITY = r"\d+(?:\.\d+)?(?:[numkMGTPE]|[KMGTPE]i|[eE]\d+)?"
VARIABLE = r"[A-Za-z_][A-Za-z0-9_]*"
TOLERATION = (
    rf"(?P<key>{QUALIFIED})(?:=(?P<value>{LABEL_VALUE}))?(?::(?P<effect>NoSchedule|PreferNoSchedule|NoExecute))?"
)
NAME_WORDS = "small letters, digits and dashes"

# What each text must look like, where it is given.
FORMS = {
    "image": (r"[^\s@:/][^\s]*", "an image with its registry, such as us-docker.pkg.dev/project/repository/maxhydra:1"),
    "namespace": (LABEL, f"{NAME_WORDS}, up to 63"),
    "context": (r"\S+", "a context of the kubeconfig; kubectl config get-contexts lists them"),
    "topology": (r"[1-9]\d*(x[1-9]\d*){1,2}", "chips along each side of a slice, such as 4x4 or 2x2x4"),
    "cpu": (QUANTITY, "a quantity of Kubernetes, such as 8 or 500m"),
    "memory": (QUANTITY, "a quantity of Kubernetes, such as 64Gi"),
    "queue": (LABEL, f"a LocalQueue of the namespace: {NAME_WORDS}, up to 63"),
    "priority_class": (SUBDOMAIN, f"{NAME_WORDS} and dots"),
    "service_account": (SUBDOMAIN, f"{NAME_WORDS} and dots"),
    "prefix": (PREFIX, f"{NAME_WORDS}, a letter first, up to 15"),
}
LEAST = {"slices": 1, "nodes": 1, "max_restarts": 0, "grace_seconds": 1}
# The same for numbers that may be null.
LEAST_IF_GIVEN = {"chips_per_node": 1, "ttl_seconds": 0}
LISTS, MAPPINGS, SWITCHES = (
    ("secrets", "tolerations", "command"),
    ("env", "volumes", "node_selector"),
    ("detach", "exclusive"),
)


@dataclasses.dataclass(frozen=True)
class GkeSettings(LauncherSettings):
    """A JobSet for each job: hydra.launcher."""

    kind: ClassVar[str] = "gke"

    image: str = ""
    """Container image that has maxhydra, with its registry and tag. Must be given."""
    outputs: str = ""
    """Where runs are kept: gs://bucket/folder, pvc://claim/folder, host:///folder, or empty:// for nowhere. Must be
    given. Same place and same sweep again go on from the checkpoints there."""
    namespace: str = "default"
    """Where the objects are made."""
    context: str | None = None
    """Of the kubeconfig. null: the current one, or the pod's own account inside a cluster."""
    topology: str | None = None
    """TPU: the chips of a slice, 4x4 or 2x2x4; how many nodes that is follows from the hardware option."""
    slices: int = 1
    """Slices, or groups of nodes, of a job."""
    nodes: int = 1
    """GPU, CPU: nodes of a slice, each with one process."""
    chips_per_node: int | None = None
    """GPU: taken of each node. null: all that the hardware option says there are."""
    exclusive: bool | None = None
    """A node pool to each slice alone. null: for TPU slices of several nodes, which are a node pool each."""
    cpu: str | None = None
    """Asked of each node, such as 8. null: nothing is asked."""
    memory: str | None = None
    """Asked of each node, such as 64Gi, which is a limit too."""
    queue: str | None = None
    """LocalQueue of Kueue in which jobs wait for their turn."""
    priority_class: str | None = None
    """PriorityClass of the pods."""
    service_account: str | None = None
    """Kubernetes service account of the pods, by which they may read and write buckets."""
    secrets: tuple[str, ...] = ()
    """Names of Secrets, whose keys become environment variables; values never pass through here."""
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    """Environment variables that are no secrets."""
    volumes: dict[str, str] = dataclasses.field(default_factory=dict)
    """Folder in the pod -> gs://bucket/folder, pvc://claim/folder, host:///folder, empty://, or memory://."""
    node_selector: dict[str, str] = dataclasses.field(default_factory=dict)
    """Labels that nodes must have, besides those that the hardware option asks for."""
    tolerations: tuple[str, ...] = ()
    """Taints to put up with: key, key=value, key=value:NoSchedule."""
    command: tuple[str, ...] = ("python", "-m", "maxhydra")
    """How the image runs maxhydra."""
    max_restarts: int = 3
    """How often a job that failed is started again; one that was preempted always is."""
    grace_seconds: int = 60
    """From SIGTERM to SIGKILL, in which a run saves. Spot nodes give 25 at most."""
    ttl_seconds: int | None = 7 * 86400
    """After which a job that is over is deleted from the cluster. null: never."""
    prefix: str = "maxhydra"
    """Names of objects begin with it."""
    detach: bool = False
    """Submit and return; `maxhydra sweep resume` looks after the jobs later."""

    @property
    def detached(self) -> bool:
        return self.detach

    def problems(self) -> Iterator[Problem]:
        if wrong := list(self._type_problems()):
            yield from wrong
            return
        needed = {"image": FORMS["image"][1], "outputs": SOURCES}
        yield from (
            Problem(f"{KEY}.{name}", "must be given", accepted=words)
            for name, words in needed.items()
            if not getattr(self, name)
        )
        yield from unlike(self, {name: form for name, form in FORMS.items() if getattr(self, name) != ""})
        yield from out_of_range(self, LEAST)
        given = {name: least for name, least in LEAST_IF_GIVEN.items() if getattr(self, name) is not None}
        yield from out_of_range(self, given)
        yield from self._place_problems()
        yield from self._list_problems()

    def _type_problems(self) -> Iterator[Problem]:
        for names, kind, words in (
            (LISTS, tuple, "[a,b]"),
            (MAPPINGS, dict, "{key:value}"),
            (SWITCHES, bool, "true, false"),
        ):
            for name in names:
                value = getattr(self, name)
                if not isinstance(value, kind) and not (name == "exclusive" and value is None):
                    yield Problem(f"{KEY}.{name}", "is of the wrong kind", value, words)

    def _place_problems(self) -> Iterator[Problem]:
        """Of outputs and volumes."""
        sources = [(f"{KEY}.volumes.{mount}", source) for mount, source in self.volumes.items()]
        sources += [(f"{KEY}.outputs", self.outputs)] if self.outputs else []
        yield from (
            Problem(path, "is no place for files", it, SOURCES) for path, it in sources if not is_source(str(it))
        )
        for mount in self.volumes:
            if not re.fullmatch(r"(/[\w.-]+)+", mount) or mount in RESERVED:
                accepted = f"an absolute path other than {' and '.join(RESERVED)}"
                yield Problem(f"{KEY}.volumes", "has a folder that cannot be mounted", mount, accepted)

    def _list_problems(self) -> Iterator[Problem]:
        if not self.command:
            yield Problem(f"{KEY}.command", "is empty", accepted="[python,-m,maxhydra]")
        yield from _unlike("secrets", self.secrets, SUBDOMAIN, "the name of a Secret")
        yield from _unlike("env", self.env, VARIABLE, "letters, digits and _, no digit first")
        yield from _unlike("node_selector", self.node_selector, QUALIFIED, "a label, such as example.com/pool")
        yield from _unlike("node_selector", self.node_selector.values(), LABEL_VALUE, "the value of a label")
        yield from _unlike("tolerations", self.tolerations, TOLERATION, "key, key=value, key=value:NoSchedule")
        for name in self.env:
            if is_secret_name(name):
                hint = f"kubectl create secret generic NAME --from-literal={name}=..., and {KEY}.secrets=[NAME]"
                yield Problem(f"{KEY}.env.{name}", "looks like a secret, and a JobSet is read by many", hint=hint)


def _unlike(name: str, values: Iterable[object], pattern: str, words: str) -> Iterator[Problem]:
    for value in values:
        if not re.fullmatch(pattern, str(value)):
            yield Problem(f"{KEY}.{name}", "cannot be read", value, words)
