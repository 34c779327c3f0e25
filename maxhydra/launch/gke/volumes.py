"""Where a pod's files lie, written as one address each: gs://bucket/folder, pvc://claim/folder, host:///folder, ..."""

import re
from typing import Any

OUTPUTS = "/outputs"
CONFIG = "/etc/maxhydra"
SHARED_MEMORY = "/dev/shm"
RESERVED = (OUTPUTS, CONFIG)
SOURCES = "gs://bucket/folder, pvc://claim/folder, host:///folder, empty:// (with the pod), memory:// (in its memory)"

_FOLDER = r"(?:/(?!(?:.*/)?\.\.(?:/|$))(?P<folder>[^\s,]*))?"
_FORMS = {
    "gs": re.compile(rf"gs://(?P<name>[a-z0-9][a-z0-9._-]{{1,61}}[a-z0-9]){_FOLDER}"),
    "pvc": re.compile(rf"pvc://(?P<name>[a-z0-9](?:[-a-z0-9.]{{0,251}}[a-z0-9])?){_FOLDER}"),
    "host": re.compile(rf"host://(?P<name>){_FOLDER}"),
    "empty": re.compile(r"empty://(?P<name>)(?P<folder>)"),
    "memory": re.compile(r"memory://(?P<name>)(?P<folder>)"),
}
GCSFUSE = "gcsfuse.csi.storage.gke.io"
# The sign by which GKE puts the process that serves buckets beside a pod.
GCSFUSE_ANNOTATION = {"gke-gcsfuse/volumes": "true"}


def is_source(text: str) -> bool:
    scheme = text.partition(":")[0]
    return scheme in _FORMS and _FORMS[scheme].fullmatch(text) is not None


def is_bucket(source: str) -> bool:
    return source.startswith("gs:")


def is_of_a_pod(source: str) -> bool:
    """Whether it comes and goes with its pod, and is seen by no other."""
    return source.startswith(("empty:", "memory:"))


def volume(name: str, source: str) -> dict[str, Any]:
    """An entry of a pod's `volumes`."""
    scheme, place, folder = _parts(source)
    match scheme:
        case "gs":
            options = ["implicit-dirs", *([f"only-dir={folder}"] if folder else [])]
            attributes = {"bucketName": place, "mountOptions": ",".join(options)}
            return {"name": name, "csi": {"driver": GCSFUSE, "volumeAttributes": attributes}}
        case "pvc":
            return {"name": name, "persistentVolumeClaim": {"claimName": place}}
        case "host":
            return {"name": name, "hostPath": {"path": f"/{folder}", "type": "DirectoryOrCreate"}}
        case "memory":
            return {"name": name, "emptyDir": {"medium": "Memory"}}
        case _:
            return {"name": name, "emptyDir": {}}


def mount(name: str, path: str, source: str) -> dict[str, Any]:
    """An entry of a container's `volumeMounts`."""
    scheme, _, folder = _parts(source)
    below = {"subPath": folder} if scheme == "pvc" and folder else {}
    return {"name": name, "mountPath": path, **below}


def _parts(source: str) -> tuple[str, str, str]:
    scheme = source.partition(":")[0]
    found = _FORMS[scheme].fullmatch(source)
    assert found is not None, source
    return scheme, found["name"], (found["folder"] or "").strip("/")
