"""Frequent checkpoints on the disks of the hosts that train: one part per process, and copies of parts. No jax.

    FOLDER/RUN/process-2/STEP/2/     the part that process 2 wrote: one file per array, with its shards in order
    FOLDER/RUN/process-2/STEP/1/     a copy of the part that process 1 wrote

A part has an index.json with the shapes and shards of its arrays, and a manifest.json with the digests of its files. It
gets its name when it is complete. A step can be restored if an intact copy of every part exists on any of the hosts.
"""

import contextlib
import dataclasses
import json
import logging
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from maxhydra.record.checkpoint_manifest import (
    MANIFEST,
    DamagedCheckpointError,
    digest_bytes,
    read_manifest,
    verify_files,
    write_manifest,
)

log = logging.getLogger("maxhydra")

INDEX, ARRAYS = "index.json", "arrays"
# Suffix of a part that is being written.
PARTIAL = ".partial"
# Bounds of a shard within its array: (start, stop) of each dimension.
Bounds = tuple[tuple[int, int], ...]


@dataclasses.dataclass(frozen=True)
class Lineage:
    """Which steps belong to the history of a run: its creation time, and the first step of each of its sessions.

    None is the first step of a session that ended before it was known, and of the current one.
    """

    created: str
    start_steps: Sequence[int | None]

    def contains(self, part: "Part") -> bool:
        """Whether a part was written by this run, and no later session has started from an earlier step."""
        later = self.start_steps[part.session :]
        return part.created == self.created and all(start is None or start >= part.step for start in later)


@dataclasses.dataclass(frozen=True)
class Part:
    """What identifies a part: the run and the session that wrote it, the step, and which of how many parts it is."""

    created: str
    session: int
    step: int
    number: int
    parts: int


class HostArray(NamedTuple):
    """The shards of an array that one process writes: bounds and bytes."""

    shape: Sequence[int]
    dtype: str
    shards: Sequence[tuple[Bounds, Any]]


class Shard(NamedTuple):
    """A shard of an array: its bounds, its place in the array's file of a part, and the digest of its bytes."""

    bounds: Bounds
    part: int
    offset: int
    size: int
    digest: str


@dataclasses.dataclass(frozen=True)
class StoredArray:
    """Shape, dtype and shards of an array, over all parts of a step."""

    shape: tuple[int, ...]
    dtype: str
    shards: list[Shard]


def local_run_folder(folder: str, run: Path) -> Path:
    """The folder of a run's local checkpoints on this host."""
    return Path(folder).expanduser() / "/".join(run.absolute().parts[1:])


def process_folder(root: Path, process: int) -> Path:
    return root / f"process-{process}"


def write_part(folder: Path, part: Part, arrays: Mapping[str, HostArray], data: Any) -> None:
    """Write a part below the folder of a process. Raises OSError; nothing is left then."""
    with _new_part(folder, part) as partial:
        partial.mkdir(parents=True)
        entries = {name: _write_array(partial / ARRAYS / name, array) for name, array in arrays.items()}
        index = {**dataclasses.asdict(part), "arrays": entries, "data": data}
        (partial / INDEX).write_text(json.dumps(index), encoding="utf-8")
        write_manifest(partial)


def copy_part(folder: Path, part: Part, read: Callable[[str, Path], None]) -> None:
    """Copy a part of another process; `read` copies a file of it to a path. The digests are verified before it counts.

    Raises FileNotFoundError as long as the part does not exist, DamagedCheckpointError, and the errors of `read`.
    """
    with _new_part(folder, part) as partial:
        read(MANIFEST, partial / MANIFEST)
        manifest = read_manifest(partial)
        assert manifest is not None
        for name in manifest.files:
            read(name, partial / name)
        if (damage := verify_files(partial)) is not None:
            raise damage
        if (found := _read_part(partial)) != part:
            raise DamagedCheckpointError(INDEX, f"belongs to another checkpoint: {found}")


def list_parts(root: Path) -> Iterator[tuple[str, Part]]:
    """The complete parts on this host by path below `root`, those of all processes; unreadable ones are named."""
    for path in sorted(root.glob("process-*/*/*")):
        if not re.fullmatch("[0-9]+", path.name):
            continue
        if (part := _read_part(path)) is None:
            log.warning("local checkpoint %s is damaged: %s cannot be read", path, INDEX)
        else:
            yield path.relative_to(root).as_posix(), part


def complete_steps(parts: Iterable[Part], lineage: Lineage) -> dict[int, Part]:
    """Steps of the lineage all of whose parts exist, in ascending order, each with one of its parts."""
    groups: dict[Part, set[int]] = {}
    for part in parts:
        if lineage.contains(part):
            groups.setdefault(dataclasses.replace(part, number=0), set()).add(part.number)
    complete = [part for part, numbers in groups.items() if numbers == set(range(part.parts))]
    return {part.step: part for part in sorted(complete, key=lambda part: (part.step, part.session))}


def delete_steps(folder: Path, is_obsolete: Callable[[int], bool]) -> None:
    """Delete steps below the folder of a process."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if re.fullmatch("[0-9]+", path.name) and is_obsolete(int(path.name)):
            shutil.rmtree(path, ignore_errors=True)


def merge_indices(indices: Sequence[Mapping[str, Any]]) -> dict[str, StoredArray]:
    """The arrays of a step, from the indices of its parts in order."""
    arrays: dict[str, StoredArray] = {}
    for number, index in enumerate(indices):
        for name, entry in index["arrays"].items():
            array = arrays.setdefault(name, StoredArray(tuple(entry["shape"]), entry["dtype"], []))
            for shard in entry["shards"]:
                bounds = tuple((start, stop) for start, stop in shard["bounds"])
                array.shards.append(Shard(bounds, number, shard["offset"], shard["size"], shard["digest"]))
    return arrays


def choose_holders(hosts: Sequence[str]) -> list[int]:
    """For each process, the one that keeps a copy of its part: on the next host, so that a lost host loses no part.

    With a single host, the next process.
    """
    if len(set(hosts)) == 1:
        return [(process + 1) % len(hosts) for process in range(len(hosts))]
    members: dict[str, list[int]] = {}
    for process, host in enumerate(hosts):
        members.setdefault(host, []).append(process)
    names = list(members)
    following = dict(zip(names, [*names[1:], names[0]], strict=True))
    positions = [members[host].index(process) for process, host in enumerate(hosts)]
    others = [members[following[host]] for host in hosts]
    return [other[position % len(other)] for position, other in zip(positions, others, strict=True)]


def _read_part(path: Path) -> Part | None:
    try:
        index = json.loads((path / INDEX).read_bytes())
        return Part(**{field.name: index[field.name] for field in dataclasses.fields(Part)})
    except (OSError, ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def _new_part(folder: Path, part: Part) -> Iterator[Path]:
    """A path for a part that gets its name at the end; after an error nothing is left.

    A part of an earlier session with the same step is replaced.
    """
    final = folder / str(part.step) / str(part.number)
    partial = final.with_name(f"{final.name}{PARTIAL}")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        yield partial
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_array(path: Path, array: HostArray) -> dict[str, Any]:
    """Write the shards of an array to a file, and return its entry in the index."""
    path.parent.mkdir(parents=True, exist_ok=True)
    entries, offset = [], 0
    with open(path, "wb", buffering=0) as file:
        for bounds, content in array.shards:
            view = memoryview(content).cast("B")
            entries.append({"bounds": bounds, "offset": offset, "size": view.nbytes, "digest": digest_bytes(view)})
            offset += view.nbytes
            while view:  # one call writes at most 2 GiB
                view = view[file.write(view) :]
    return {"shape": list(array.shape), "dtype": array.dtype, "shards": entries}
