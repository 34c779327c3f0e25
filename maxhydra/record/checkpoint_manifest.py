"""manifest.json of a checkpoint: its format version, and the size and SHA-256 digest of every file. No jax.

The manifest is written before the checkpoint's folder gets its final name, and verified before the files are read:
neither Orbax nor the compressed chunks detect a changed byte. SHA-256 was the fastest digest of hashlib on the CPUs
measured (1.4 GiB/s per core with the SHA instructions of ARMv8; BLAKE2b 0.6 GiB/s), and hashlib releases the GIL.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from maxhydra.record.atomic_io import migrate_format, replace_file, stamp

MANIFEST = "manifest.json"
# 1: no manifest. 2: manifest with format, files and digest.
CHECKPOINT_FORMAT = 2
# Orbax's file about a step, which repeats the format: it distinguishes a lost manifest from one that never existed.
STEP_METADATA = "_CHECKPOINT_METADATA"
_THREADS = min(8, os.cpu_count() or 1)


class DamagedCheckpointError(Exception):
    """A checkpoint differs from its manifest; `file` is relative to the checkpoint's folder."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file} {reason}")
        self.file, self.reason = file, reason


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """Size in bytes and SHA-256 digest of a file."""

    size: int
    sha256: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The verified content of manifest.json."""

    files: Mapping[str, FileDigest]
    digest: str
    """SHA-256 of everything else in the file, which identifies the checkpoint."""


def manifest_digest(folder: Path) -> str | None:
    """A digest that identifies a checkpoint's content; None for checkpoints without a manifest."""
    manifest = read_manifest(folder)
    return None if manifest is None else manifest.digest


def write_manifest(folder: Path, digests: Mapping[str, FileDigest] | None = None) -> None:
    """Write the manifest of all files in the folder. `digests` holds those of files that were hashed before."""
    known = digests or {}
    names = [name for name in _list_files(folder) if name != MANIFEST]
    files = {**known, **_hash_files(folder, [name for name in names if name not in known])}
    entries = {name: dataclasses.asdict(files[name]) for name in sorted(names)}
    content = {**stamp(CHECKPOINT_FORMAT), "files": entries}
    replace_file(folder / MANIFEST, json.dumps({**content, "digest": _content_digest(content)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Read and verify manifest.json; None if the checkpoint was written before manifests existed.

    Raises DamagedCheckpointError if the manifest is damaged or missing, and NewerFormatError.
    """
    try:
        content = json.loads((folder / MANIFEST).read_bytes())
        digest = content.pop("digest")
    except FileNotFoundError:
        if _expects_manifest(folder):
            raise DamagedCheckpointError(MANIFEST, "is missing") from None
        return None
    except (ValueError, OSError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(MANIFEST, "cannot be read") from error
    if digest != _content_digest(content):
        raise DamagedCheckpointError(MANIFEST, "does not match its own digest")
    current = migrate_format(content, current=CHECKPOINT_FORMAT, migrations={})
    return Manifest({name: FileDigest(**entry) for name, entry in current["files"].items()}, digest)


def verify_files(
    folder: Path, items: Collection[str] | None = None, *, part: int = 0, parts: int = 1
) -> DamagedCheckpointError | None:
    """Compare files with the manifest and return the first difference; None also without a manifest.

    `items` limits the check to these sub-folders and the files next to them, so that loading weights does not read
    optimizer states. `part` of `parts` hashes only a share of the bytes, for hosts that verify together.
    """
    try:
        manifest = read_manifest(folder)
        if manifest is None:
            return None
        expected = {name: entry for name, entry in manifest.files.items() if _is_in(name, items)}
        _compare_listing(folder, expected, items)
        share = _share(expected, part, parts)
        found = _hash_files(folder, share)
        for name in share:
            if found[name] != expected[name]:
                raise DamagedCheckpointError(name, "has changed since it was written: its SHA-256 digest differs")
    except DamagedCheckpointError as error:
        return error
    return None


def _compare_listing(folder: Path, expected: Mapping[str, FileDigest], items: Collection[str] | None) -> None:
    """Raise for files that are missing, have another size or were added; hidden files of file systems are ignored."""
    present = {name for name in _list_files(folder) if name != MANIFEST and _is_in(name, items)}
    for name, entry in expected.items():
        if name not in present:
            raise DamagedCheckpointError(name, "is missing")
        if (size := (folder / name).stat().st_size) != entry.size:
            raise DamagedCheckpointError(name, f"has {size:,} bytes instead of {entry.size:,}")
    for name in sorted(present - expected.keys()):
        if not any(part.startswith(".") for part in name.split("/")):
            raise DamagedCheckpointError(name, "is not part of the checkpoint")


def _is_in(name: str, items: Collection[str] | None) -> bool:
    item, separator, _ = name.partition("/")
    return items is None or not separator or item in items


def _share(expected: Mapping[str, FileDigest], part: int, parts: int) -> list[str]:
    """The files of one of several hosts: by descending size, so that all hash about the same number of bytes."""
    return sorted(expected, key=lambda name: (-expected[name].size, name))[part::parts]


def _list_files(folder: Path) -> Iterator[str]:
    for root, _, names in os.walk(folder):
        for name in names:
            yield (Path(root) / name).relative_to(folder).as_posix()


def _hash_files(folder: Path, names: Collection[str]) -> dict[str, FileDigest]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="sha256") as threads:
        return dict(zip(names, threads.map(lambda name: _hash_file(folder, name), names), strict=True))


def _hash_file(folder: Path, name: str) -> FileDigest:
    try:
        with open(folder / name, "rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            return FileDigest(file.tell(), digest)
    except OSError as error:
        raise DamagedCheckpointError(name, f"cannot be read: {error.strerror or error}") from error


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _expects_manifest(folder: Path) -> bool:
    """Whether Orbax's metadata of the step says that the checkpoint was written with a manifest."""
    try:
        metadata = json.loads((folder / STEP_METADATA).read_bytes())
        return int(metadata["custom_metadata"]["format"]) >= CHECKPOINT_FORMAT
    except (ValueError, OSError, KeyError, TypeError):
        return False
