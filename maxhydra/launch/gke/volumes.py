"""Volumes of a pod as URLs: gs://bucket/folder, pvc://claim/folder, host:///folder, empty://, memory://."""

import re
from typing import Any

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
