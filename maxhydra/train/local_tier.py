"""Frequent checkpoints on the hosts' own disks (checkpoint.local_every), each part also on another host (peer_copies).

A save copies the shards of this process to host memory, which is all that the training loop waits for. A thread writes
them and copies the parts of other processes from their servers (runtime/transfer.py). To restore, all processes
exchange lists of the parts that they have, and read the shards that their devices need: from the own disk if it has
them, else from another host. Every shard is verified when it is read; a damaged one is named, and a copy is read.
"""

import contextlib
import dataclasses
import functools
import logging
import math
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import distributed

from maxhydra.config.schema.checkpoint import Checkpoint
from maxhydra.convert.orbax_io import leaves_by_name
from maxhydra.record.checkpoint_manifest import DamagedCheckpointError
from maxhydra.record.checkpoint_tiers import local_steps
from maxhydra.record.local_checkpoints import (
    Bounds,
    HostArray,
    Lineage,
    Part,
    StoredArray,
    choose_holders,
    complete_steps,
    copy_part,
    delete_steps,
    list_parts,
    local_run_folder,
    merge_indices,
    process_folder,
    write_part,
)
from maxhydra.record.run_dir import RunDirectory
from maxhydra.runtime.channel import broadcast, coordinator_host, gather
from maxhydra.runtime.transfer import Address, FileClient, FileServer, PartReader, Place, TransferError, reachable_host
from maxhydra.train.loss import Tree

log = logging.getLogger("maxhydra")

# Time for which a process waits for the part of another one after it has written its own.
COPY_SECONDS = 60.0
POLL_SECONDS = 0.05
# Steps that are not deleted, in addition to the one being written. A process can be two saves ahead of another one's
# writes: it has completed a step that follows the other's start of a save, which waits for the save before.
KEEP = 2
PINNED = "pinned_host"


class LocalTier(Protocol):
    """The checkpoints of a run on the disks of its hosts."""

    def steps(self) -> list[int]:
        """Steps that can be restored if they are intact, in ascending order. A collective call."""
        ...

    def read(self, step: int, expected: Tree) -> tuple[Tree, dict[str, Any], Path]:
        """The arrays of a step on the shardings of `expected`, the data position, and the folder. A collective call.

        Raises DamagedCheckpointError in all processes if one of them cannot read its arrays.
        """
        ...

    def save(self, step: int, state: Tree, data: dict[str, Any]) -> None:
        """Copy the state to host memory, and write it in the background."""
        ...

    def is_saving(self) -> bool: ...

    def wait(self) -> None:
        """Wait for the save in flight; a failure was logged."""
        ...

    def close(self, *, newest: int) -> None:
        """Wait for the save in flight, and delete the steps up to `newest`, which the run's folder has now."""
        ...


class NoLocalTier:
    """checkpoint.local_every=null."""

    def steps(self) -> list[int]:
        return []

    def read(self, step: int, expected: Tree) -> tuple[Tree, dict[str, Any], Path]:
        raise AssertionError("without local checkpoints, steps() is empty")

    def save(self, step: int, state: Tree, data: dict[str, Any]) -> None:
        return

    def is_saving(self) -> bool:
        return False

    def wait(self) -> None:
        return

    def close(self, *, newest: int) -> None:
        return


def open_local_tier(config: Checkpoint, run: RunDirectory) -> LocalTier:
    """The local checkpoints of a run, whose session must be open. A collective call."""
    if config.local_every is None:
        return NoLocalTier()
    facts = broadcast(_lineage_facts(run) if run.writes else None)
    return HostDisks(
        local_run_folder(config.local_folder, run.path), Lineage(*facts), has_copies=config.peer_copies > 0
    )


def _lineage_facts(run: RunDirectory) -> list[Any]:
    facts = run.read()
    return [facts["created"], [session["start_step"] for session in facts["sessions"]]]


class HostDisks:
    """Local checkpoints below a folder on the disk of each host."""

    def __init__(self, root: Path, lineage: Lineage, *, has_copies: bool):
        self._root, self._lineage, self._process = root, lineage, jax.process_index()
        self._folder = process_folder(root, self._process)
        root.mkdir(parents=True, exist_ok=True)
        self._server = FileServer(root, _own_address()) if jax.process_count() > 1 else None
        rows = gather([_disk_name(root), None if self._server is None else self._server.address])
        self._disks: list[str] = [disk for disk, _ in rows]
        self._sharing = [process for process, disk in enumerate(self._disks) if disk == self._disks[self._process]]
        self._peers = [None if address is None else Address(*address) for _, address in rows]
        holders = choose_holders(self._disks) if has_copies and len(rows) > 1 else []
        self._copied = [part for part, holder in enumerate(holders) if holder == self._process]
        self._owned: dict[str, list[tuple[Bounds, jax.Device]]] = {}
        self._places: dict[Part, list[Place]] = {}
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="local checkpoint")
        self._in_flight: Future[None] | None = None
        self._is_closed = threading.Event()

    def steps(self) -> list[int]:
        return list(self._find_complete())

    def _find_complete(self) -> dict[int, Part]:
        """Complete steps over all hosts, each with one of its parts. A collective call."""
        own = [(path, dataclasses.astuple(part)) for path, part in list_parts(self._root)]
        # Processes that share a disk divide its parts among them.
        rows = gather(own[self._sharing.index(self._process) :: len(self._sharing)])
        self._places = {}
        for process, found in enumerate(rows):
            for path, values in found:
                self._places.setdefault(Part(*values), []).append(Place(process, path))
        return complete_steps(self._places, self._lineage)

    def read(self, step: int, expected: Tree) -> tuple[Tree, dict[str, Any], Path]:
        first = self._find_complete()[step]
        parts = [dataclasses.replace(first, number=number) for number in range(first.parts)]
        reader = PartReader(self._root, self._sharing, self._peers, [self._places[part] for part in parts])
        result, failure = None, ""
        try:
            indices = [reader.read_index(part) for part in parts]
            result = _read_arrays(merge_indices(indices), expected, reader), dict(indices[0]["data"])
        except (DamagedCheckpointError, OSError) as error:
            failure = f"{error} (process {self._process})"
        finally:
            reader.close()
        outcomes = gather([failure, reader.damages])
        # In all processes, because only process 0 writes a log.
        for damage in sorted({damage for _, damages in outcomes for damage in damages}):
            log.warning("%s", damage)
        if failure := next(filter(None, (found for found, _ in outcomes)), ""):
            raise DamagedCheckpointError(f"the local checkpoint of step {step}", f"cannot be used: {failure}")
        assert result is not None
        log.info("read the local checkpoint of step %d: %s", step, reader.describe())
        return *result, self._folder / str(step)

    def save(self, step: int, state: Tree, data: dict[str, Any]) -> None:
        self.wait()
        retained = sorted(found for found in local_steps(self._folder) if found < step)[-KEEP:]
        delete_steps(self._folder, lambda found: found not in retained)
        arrays = self._copy_to_host(leaves_by_name(state))
        session, process = len(self._lineage.start_steps), self._process
        part = Part(self._lineage.created, session, step, process, len(self._disks))
        self._in_flight = self._pool.submit(self._write, part, arrays, data)

    def is_saving(self) -> bool:
        return self._in_flight is not None and not self._in_flight.done()

    def wait(self) -> None:
        if self._in_flight is not None:
            self._in_flight.result()
            self._in_flight = None

    def close(self, *, newest: int) -> None:
        self._is_closed.set()
        self._pool.shutdown()
        if self._server is not None:
            self._server.close()
        for folder in self._root.glob("process-*"):
            delete_steps(folder, lambda step: step <= newest)
        for folder in (*self._root.glob("process-*"), self._root):
            with contextlib.suppress(OSError):  # has newer steps
                folder.rmdir()

    def _copy_to_host(self, arrays: Mapping[str, jax.Array]) -> dict[str, HostArray]:
        """The shards that this process writes, in host memory: the next step reuses the device buffers."""
        owned = {name: self._own_shards(name, array) for name, array in arrays.items()}
        copies = iter(copy_to_host([data for shards in owned.values() for _, data in shards]))
        return {
            name: HostArray(array.shape, array.dtype.name, [(bounds, next(copies)) for bounds, _ in owned[name]])
            for name, array in arrays.items()
        }

    def _own_shards(self, name: str, array: jax.Array) -> list[tuple[Bounds, jax.Array]]:
        """Of the equal shards on several devices one is written, on another device for each array and shard."""
        if name not in self._owned:
            owners = shard_owners(array.sharding, array.shape, first=len(self._owned))
            own = [(bounds, device) for bounds, device in owners if device.process_index == self._process]
            self._owned[name] = own
        on_device = {shard.device: shard.data for shard in array.addressable_shards}
        return [(bounds, on_device[device]) for bounds, device in self._owned[name]]

    def _write(self, part: Part, arrays: Mapping[str, HostArray], data: dict[str, Any]) -> None:
        try:
            write_part(self._folder, part, arrays, data)
            for number in self._copied:
                self._copy(dataclasses.replace(part, number=number))
        except (OSError, DamagedCheckpointError, TransferError) as error:
            if not self._is_closed.is_set():
                log.error("the local checkpoint of step %d is incomplete: %s; training continues", part.step, error)

    def _copy(self, part: Part) -> None:
        """Copy the part of another process, once it is complete there."""
        address, deadline = self._peers[part.number], time.monotonic() + COPY_SECONDS
        assert address is not None
        source = f"process-{part.number}/{part.step}/{part.number}"
        with contextlib.closing(FileClient(address)) as client:
            while True:
                try:
                    copy_part(self._folder, part, lambda name, path: client.copy(f"{source}/{name}", path))
                    return
                except FileNotFoundError:
                    if time.monotonic() > deadline or self._is_closed.wait(POLL_SECONDS):
                        raise


def shard_owners(
    sharding: jax.sharding.Sharding, shape: Sequence[int], *, first: int = 0
) -> list[tuple[Bounds, jax.Device]]:
    """The distinct shards of an array, each with the device that saves it; `first` rotates among equal ones."""
    groups: dict[Bounds, list[jax.Device]] = {}
    for device, index in sharding.devices_indices_map(tuple(shape)).items():
        groups.setdefault(_bounds(index, shape), []).append(device)
    owners = []
    for number, bounds in enumerate(sorted(groups)):
        devices = sorted(groups[bounds], key=lambda device: device.id)
        owners.append((bounds, devices[(first + number) % len(devices)]))
    return owners


def _bounds(index: Sequence[slice], shape: Sequence[int]) -> Bounds:
    return tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))


def copy_to_host(arrays: Sequence[jax.Array]) -> list[np.ndarray]:
    """Copies of arrays of one device each in host memory, as bytes.

    Device memory is copied to pinned memory, many times faster than to memory that the operating system has yet to
    allocate page by page.
    """
    return [_as_bytes(array, staged) for array, staged in zip(arrays, list(map(_stage, arrays)), strict=True)]


def _stage(array: jax.Array) -> jax.Array:
    """Start to copy an array to pinned memory; the array itself if it is in host memory already."""
    kind, device = array.sharding.memory_kind, next(iter(array.devices()))
    if (
        kind != "device"
        or device.platform == "cpu"
        or PINNED not in {found.kind for found in device.addressable_memories()}
    ):
        return array
    return jax.device_put(array, array.sharding.with_memory_kind(PINNED))


def _as_bytes(array: jax.Array, staged: jax.Array) -> np.ndarray:
    host = np.ascontiguousarray(staged)
    # NumPy gets a view of host memory, which the next step overwrites unless it belongs to a copy.
    return (host.copy() if staged is array and host.base is not None else host).reshape(-1).view(np.uint8)


def _read_arrays(stored: Mapping[str, StoredArray], expected: Tree, reader: PartReader) -> Tree:
    """The arrays of a step on the shardings of `expected`. Raises DamagedCheckpointError if they do not match."""
    names = leaves_by_name(expected)
    for name in sorted({*names, *stored}):
        shape = None if name not in names else tuple(names[name].shape)
        found = None if name not in stored else stored[name].shape
        if shape != found:
            raise DamagedCheckpointError(name, f"has the shape {found} instead of {shape}")
    arrays = {name: _read_array(name, stored[name], leaf, reader) for name, leaf in names.items()}
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(expected), list(arrays.values()))


def _read_array(name: str, stored: StoredArray, target: jax.ShapeDtypeStruct, reader: PartReader) -> jax.Array:
    @functools.cache
    def content(number: int) -> np.ndarray:
        shard = stored.shards[number]
        flat = np.frombuffer(reader.read_shard(name, shard), jnp.dtype(stored.dtype))
        return flat.reshape([stop - start for start, stop in shard.bounds])

    def assemble(index: tuple[slice, ...] | None) -> np.ndarray:
        needed = _bounds(index or (), stored.shape)
        result = np.empty([stop - start for start, stop in needed], jnp.dtype(stored.dtype))
        filled = 0
        for number, shard in enumerate(stored.shards):
            pairs = list(zip(needed, shard.bounds, strict=True))
            overlap = [(max(a, c), min(b, d)) for (a, b), (c, d) in pairs]
            if all(start < stop for start, stop in overlap):
                target_part = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, needed, strict=True))
                source_part = tuple(slice(a - c, b - c) for (a, b), (c, _) in zip(overlap, shard.bounds, strict=True))
                result[target_part] = content(number)[source_part]
                filled += math.prod(stop - start for start, stop in overlap)
        if filled != result.size:
            raise DamagedCheckpointError(name, f"has {filled:,} of {result.size:,} elements")
        return result.astype(target.dtype, copy=False)

    return jax.make_array_from_callback(stored.shape, target.sharding, assemble)


def _own_address() -> str:
    return reachable_host(coordinator_host(distributed.global_state))


def _disk_name(root: Path) -> str:
    """Identifies the folder: processes with the same name see the same files."""
    status = root.stat()
    return f"{socket.gethostname()}:{status.st_dev}:{status.st_ino}"
