"""Fingerprints of input files: bounded in size and cost, and comparable so that a change can be described. No jax.

A fingerprint covers the sizes of all files and the content of a sample: everything if the files have at most
HASHED_BYTES together, else evenly spaced blocks of at most HASHED_FILES files. Names and modification times are
recorded for messages only: a moved or touched file with the same content has not changed.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Limits per set of files. Hashing 64 MiB takes less than 0.1 s.
HASHED_BYTES = 64 * 2**20
HASHED_FILES = 256
# Files that are recorded one by one; of more files only the totals are recorded.
LISTED_FILES = 64
# Blocks in which a sampled file is read, evenly spaced, including its first and last bytes.
BLOCKS = 16
READ_SIZE = 2**20
SHOWN_CHANGES = 4

Fingerprint = dict[str, Any]


def fingerprint_files(paths: Sequence[Path], *, is_full: bool = False, like: Fingerprint | None = None) -> Fingerprint:
    """Fingerprint files in their order. `like` is an earlier fingerprint whose sampling to repeat."""
    stats = [path.stat() for path in paths]
    sizes = [stat.st_size for stat in stats]
    sample = _sample_size(sizes, is_full=is_full) if like is None else like["sample"]
    hashed = _hashed_files(len(paths), sample)
    digests = [
        digest_file(path, size, sample) if i in hashed else None
        for i, (path, size) in enumerate(zip(paths, sizes, strict=True))
    ]
    content = "".join(f"{size} {digest}\n" for size, digest in zip(sizes, digests, strict=True))
    fingerprint: Fingerprint = {
        "files": len(paths),
        "bytes": sum(sizes),
        "modified": int(max((stat.st_mtime for stat in stats), default=0)),
        "sample": sample,
        "digest": hashlib.sha256(content.encode()).hexdigest(),
    }
    if len(paths) <= LISTED_FILES:
        columns = zip(_relative_names(paths), sizes, stats, digests, strict=True)
        fingerprint["list"] = [
            {"name": name, "size": size, "modified": int(stat.st_mtime), "digest": digest}
            for name, size, stat, digest in columns
        ]
    return fingerprint


def digest_file(path: Path, size: int, sample: int | None = None) -> str:
    """SHA-256 of the first `size` bytes of a file, or of about `sample` evenly spaced bytes among them."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        if sample is None or size <= sample:
            _update(digest, file, size)
        else:
            block = max(1, sample // BLOCKS)
            for number in range(BLOCKS):
                file.seek(number * (size - block) // (BLOCKS - 1))
                _update(digest, file, block)
    return digest.hexdigest()


def is_unchanged(before: Fingerprint, now: Fingerprint) -> bool:
    return bool(before["digest"] == now["digest"])


def describe_change(before: Fingerprint, now: Fingerprint, paths: Sequence[Path]) -> str:
    """Which files were added, removed, appended to or replaced, as far as the two fingerprints tell."""
    digests = f"digest {before['digest'][:12]}, now {now['digest'][:12]}"
    if "list" not in before or "list" not in now:
        sizes = [f"{each['files']} files of {each['bytes']} bytes" for each in (before, now)]
        return f"{sizes[0]}, now {sizes[1]}; {digests}" if sizes[0] != sizes[1] else f"{sizes[0]}; {digests}"
    old, new = ({entry["name"]: entry for entry in each["list"]} for each in (before, now))
    path_of = {entry["name"]: path for entry, path in zip(now["list"], paths, strict=True)}
    if len(old) == len(new) == 1:
        # A single file is the same input under another name.
        new, path_of = (dict(zip(old, each.values(), strict=True)) for each in (new, path_of))
    changes = [f"{name} was removed" for name in old if name not in new]
    changes += [f"{name} was added" for name in new if name not in old]
    for name in (name for name in old if name in new):
        changes += _describe_file(old[name], new[name], path_of[name], before["sample"])
    if not changes:
        changes = ["the order of the files has changed"]
    more = f" and {len(changes) - SHOWN_CHANGES} more changes" if len(changes) > SHOWN_CHANGES else ""
    return f"{', '.join(changes[:SHOWN_CHANGES])}{more}; {digests}"


def _describe_file(old: dict[str, Any], new: dict[str, Any], path: Path, sample: int | None) -> list[str]:
    name, before, now = old["name"], old["size"], new["size"]
    if before == now:
        return [] if old["digest"] == new["digest"] else [f"{name} was replaced by other content of the same size"]
    if now > before and old["digest"] == digest_file(path, before, sample):
        return [f"{now - before} bytes were appended to {name}"]
    return [f"{name} was replaced ({before} bytes, now {now})"]


def _sample_size(sizes: Sequence[int], *, is_full: bool) -> int | None:
    """Bytes to hash per file; None for all."""
    if is_full or sum(sizes) <= HASHED_BYTES:
        return None
    return HASHED_BYTES // min(len(sizes), HASHED_FILES)


def _hashed_files(count: int, sample: int | None) -> set[int]:
    """Indices of the files whose content is hashed, evenly spaced and including the first and last."""
    if sample is None or count <= HASHED_FILES:
        return set(range(count))
    return {number * (count - 1) // (HASHED_FILES - 1) for number in range(HASHED_FILES)}


def _relative_names(paths: Sequence[Path]) -> list[str]:
    """Names relative to the folder that contains all files, so that a moved folder has the same names."""
    if not paths:
        return []
    root = os.path.commonpath([path.absolute().parent for path in paths])
    return [os.path.relpath(path.absolute(), root) for path in paths]


def _update(digest: Any, file: Any, size: int) -> None:
    """Add the next `size` bytes of an open file to a digest."""
    while size > 0 and (chunk := file.read(min(READ_SIZE, size))):
        digest.update(chunk)
        size -= len(chunk)
