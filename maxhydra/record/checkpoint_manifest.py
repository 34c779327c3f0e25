"""manifest.json of a checkpoint: its format version, and the size and digest of every file. No jax.

The manifest is written before the checkpoint's folder gets its final name, and verified before the files are read:
neither Orbax nor the compressed chunks detect a changed byte. Files are hashed with XXH3 (128 bits), which detects
damage at 12 GiB/s per core on ARMv8, where SHA-256 with the CPU's instructions for it reaches 1.5 GiB/s; neither would
protect a folder against someone who can write to it. Checkpoints of earlier versions have SHA-256 digests.
"""

import contextlib
import dataclasses
import hashlib
import json
import mmap
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import xxhash

from maxhydra.record.atomic_io import Values, migrate_format, replace_file, stamp

MANIFEST = "manifest.json"
# 1: no manifest. 2: manifest with the SHA-256 digests of all files. 3: the manifest names its algorithm.
CHECKPOINT_FORMAT = 3
_FIRST_FORMAT_WITH_MANIFEST = 2
# Orbax's file about a step, which repeats the format: it distinguishes a lost manifest from one that never existed.
STEP_METADATA = "_CHECKPOINT_METADATA"
_ALGORITHM = "xxh3-128"
_ALGORITHMS: dict[str, Callable[..., Any]] = {"sha256": hashlib.sha256, _ALGORITHM: xxhash.xxh3_128}
_THREADS = min(8, os.cpu_count() or 1)
# Bytes of one read: each makes a thread give up and take the GIL again, which a training loop uses too.
_BUFFER = 2**20
# Seconds between two searches for complete files while a checkpoint is written.
_SCAN_SECONDS = 0.1


class DamagedCheckpointError(Exception):
    """A checkpoint differs from its manifest; `file` is relative to the checkpoint's folder."""

    def __init__(self, file: str, reason: str):
        super().__init__(f"{file} {reason}")
        self.file, self.reason = file, reason


@dataclasses.dataclass(frozen=True)
class FileDigest:
    """Size in bytes and digest of a file."""

    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """The verified content of manifest.json."""

    algorithm: str
    files: Mapping[str, FileDigest]
    digest: str
    """SHA-256 of everything else in the file, which identifies the checkpoint."""


def manifest_digest(folder: Path) -> str | None:
    """A digest that identifies a checkpoint's content; None for checkpoints without a manifest."""
    manifest = read_manifest(folder)
    return None if manifest is None else manifest.digest


class EarlyHasher:
    """Hashes files of a checkpoint in a thread, each as soon as it is complete, while the others are being written.

    `is_complete` says by a file's name that it will not change any more. Digests belong to a file rather than its name,
    because folders are renamed during a save, and apply only to an unchanged file.
    """

    def __init__(self, folder: Path, is_complete: Callable[[str], bool]):
        self._folder, self._is_complete = folder, is_complete
        self._digests: dict[_FileState, FileDigest] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="checkpoint digests", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop after the file that is being hashed."""
        self._stop.set()
        self._thread.join()

    def find(self, path: Path) -> FileDigest | None:
        """The digest of a file that was hashed and has not changed since."""
        return self._digests.get(_file_state(path.stat()))

    def _run(self) -> None:
        # A save that fails deletes the folder.
        while not self._stop.wait(_SCAN_SECONDS) and self._folder.exists():
            for name in _list_files(self._folder):
                if self._is_complete(name) and not self._stop.is_set():
                    # Renamed in between: the next search finds it again. Other errors recur when the rest is hashed.
                    with contextlib.suppress(OSError):
                        self._hash(self._folder / name)

    def _hash(self, path: Path) -> None:
        with open(path, "rb") as file:
            state = _file_state(os.fstat(file.fileno()))
            if state not in self._digests and state.size:
                self._digests[state] = FileDigest(state.size, _hash_mapped(file, state.size))


class _FileState(NamedTuple):
    """Identifies a file independently of its name; any write to it changes the state."""

    device: int
    inode: int
    size: int
    modified_ns: int


def _file_state(stat: os.stat_result) -> _FileState:
    return _FileState(stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)


def write_manifest(folder: Path, hasher: EarlyHasher | None = None) -> None:
    """Write the manifest of all files in the folder; `hasher` has the digests of some, and is stopped."""
    files: dict[str, FileDigest | None] = {name: None for name in sorted(_list_files(folder)) if name != MANIFEST}
    if hasher is not None:
        hasher.stop()
        files = {name: hasher.find(folder / name) for name in files}
    missing = [name for name, entry in files.items() if entry is None]
    known = {name: entry for name, entry in files.items() if entry is not None}
    found = {**known, **_hash_files(folder, missing, _ALGORITHM)}
    entries = {name: dataclasses.asdict(found[name]) for name in files}
    content = {**stamp(CHECKPOINT_FORMAT), "algorithm": _ALGORITHM, "files": entries}
    replace_file(folder / MANIFEST, json.dumps({**content, "digest": _content_digest(content)}, indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest | None:
    """Read and verify manifest.json; None if the checkpoint was written before manifests existed.

    Raises DamagedCheckpointError if the manifest is damaged or missing, and NewerFormatError.
    """
    try:
        return parse_manifest((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        if _expects_manifest(folder):
            raise DamagedCheckpointError(MANIFEST, "is missing") from None
        return None
    except OSError as error:
        raise DamagedCheckpointError(MANIFEST, "cannot be read") from error


def parse_manifest(text: bytes) -> Manifest:
    """Verify the content of manifest.json. Raises DamagedCheckpointError and NewerFormatError."""
    try:
        content = json.loads(text)
        digest = content.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedCheckpointError(MANIFEST, "cannot be read") from error
    if digest != _content_digest(content):
        raise DamagedCheckpointError(MANIFEST, "does not match its own digest")
    current = migrate_format(content, current=CHECKPOINT_FORMAT, migrations={2: _name_algorithm})
    if current["algorithm"] not in _ALGORITHMS:
        raise DamagedCheckpointError(MANIFEST, f"names the unknown algorithm {current['algorithm']!r}")
    files = {name: FileDigest(**entry) for name, entry in current["files"].items()}
    return Manifest(current["algorithm"], files, digest)


def _name_algorithm(values: Values) -> Values:
    """Convert a manifest of format 2, whose digests are SHA-256."""
    files = {name: {"size": entry["size"], "digest": entry["sha256"]} for name, entry in values["files"].items()}
    return {**values, "algorithm": "sha256", "files": files}


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
        found = _hash_files(folder, share, manifest.algorithm)
        for name in share:
            if found[name] != expected[name]:
                reason = f"has changed since it was written: its {manifest.algorithm} digest differs"
                raise DamagedCheckpointError(name, reason)
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
    # Without Path: a save lists its files many times.
    for root, _, names in os.walk(folder):
        inner = root[len(str(folder)) + 1 :].replace(os.sep, "/")
        yield from (f"{inner}/{name}" if inner else name for name in names)


def digest_files(folder: Path) -> dict[str, str]:
    """XXH3 digests of all files below a folder by relative name. Raises OSError if one cannot be read."""
    try:
        found = _hash_files(folder, sorted(_list_files(folder)), _ALGORITHM)
    except DamagedCheckpointError as error:
        raise OSError(str(error)) from error
    return {name: entry.digest for name, entry in found.items()}


def digest_bytes(content: Any) -> str:
    """XXH3 digest of a buffer, equal to that of a file with this content in a manifest."""
    return str(_ALGORITHMS[_ALGORITHM](content).hexdigest())


def _hash_files(folder: Path, names: Collection[str], algorithm: str) -> dict[str, FileDigest]:
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="digests") as threads:
        return dict(zip(names, threads.map(lambda name: _hash_file(folder, name, algorithm), names), strict=True))


def _hash_file(folder: Path, name: str, algorithm: str) -> FileDigest:
    digest, size, buffer = _ALGORITHMS[algorithm](), 0, memoryview(bytearray(_BUFFER))
    try:
        with open(folder / name, "rb", buffering=0) as file:
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                size += count
    except OSError as error:
        raise DamagedCheckpointError(name, f"cannot be read: {error.strerror or error}") from error
    return FileDigest(size, digest.hexdigest())


def _hash_mapped(file: BinaryIO, size: int) -> str:
    """Hash a file that was just written, in one call and without a copy of the page cache: twice as fast as reading.

    Not for verification: a mapped file on a failing disk ends the process with SIGBUS instead of an error.
    """
    with mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) as content:
        return str(_ALGORITHMS[_ALGORITHM](content).hexdigest())


def _content_digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _expects_manifest(folder: Path) -> bool:
    """Whether Orbax's metadata of the step says that the checkpoint was written with a manifest."""
    try:
        metadata = json.loads((folder / STEP_METADATA).read_bytes())
        return int(metadata["custom_metadata"]["format"]) >= _FIRST_FORMAT_WITH_MANIFEST
    except (ValueError, OSError, KeyError, TypeError):
        return False
