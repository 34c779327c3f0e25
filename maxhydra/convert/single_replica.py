"""Reading the arrays of a checkpoint that several processes hold (data parallelism): one replica reads for all.

Without this, every process reads all that its devices hold, and the storage sends the same bytes once per replica. Each
array is read by the devices of one replica, another one for each array, and sent to the others by a collective sum.
"""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = Any
# Smaller arrays are read by all: sending one takes a separate program.
MIN_BYTES = 2**20


@dataclasses.dataclass(frozen=True)
class ReplicaRead:
    """An array that one replica reads: the mesh axes over which it is replicated, and the number of the replica."""

    target: jax.ShapeDtypeStruct
    axes: tuple[str, ...]
    replica: int

    @property
    def _sharding(self) -> NamedSharding:
        assert isinstance(self.target.sharding, NamedSharding)
        return self.target.sharding

    @property
    def source(self) -> NamedSharding:
        """The sharding over the devices of the replica that reads."""
        return _on_replica(self._sharding, self.axes, self.replica)

    def send(self, array: Any) -> jax.Array:
        """The array on all devices; a placeholder in a process that has not read it. A collective call."""
        shards = [] if array is ocp.PLACEHOLDER else array.addressable_shards
        read = {shard.device: shard.data for shard in shards}
        shape, dtype = self._sharding.shard_shape(self.target.shape), self.target.dtype
        parts = [
            jnp.expand_dims(read[device], 0) if device in read else jnp.zeros((1, *shape), dtype, device=device)
            for device in _by_id(self._sharding.addressable_devices)
        ]
        mesh, replicas = self._sharding.mesh, _count(self._sharding, self.axes)
        stacked = NamedSharding(mesh, PartitionSpec(self.axes, *self._sharding.spec))
        copies = jax.make_array_from_single_device_arrays((replicas, *self.target.shape), stacked, parts)
        return _sum_bits(self._sharding)(copies)


def plan_reads(targets: Mapping[str, Any]) -> dict[str, ReplicaRead]:
    """The arrays that one replica reads, by name; the replica that has the fewest bytes so far reads the next one."""
    plans: dict[str, ReplicaRead] = {}
    assigned: dict[tuple[tuple[str, ...], int], int] = {}
    for name, target in targets.items():
        size = target.dtype.itemsize * int(np.prod(target.shape))
        axes = _replicated_axes(target)
        if not axes or size < MIN_BYTES:
            continue
        replicas = range(_count(target.sharding, axes))
        replica = min(replicas, key=lambda number: assigned.get((axes, number), 0))
        assigned[axes, replica] = assigned.get((axes, replica), 0) + size
        plans[name] = ReplicaRead(target, axes, replica)
    return plans


def read_target(plan: ReplicaRead | None, target: Any) -> Any:
    """The target of this process's read: all shards of its devices, those of the reading replica, or a placeholder."""
    if plan is None:
        return target
    sharding = plan.source
    if not sharding.addressable_devices:
        return ocp.PLACEHOLDER
    return jax.ShapeDtypeStruct(target.shape, target.dtype, sharding=sharding)


def _replicated_axes(target: Any) -> tuple[str, ...]:
    """Mesh axes over which an array is replicated; empty if a single replica spans all processes."""
    sharding = target.sharding
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh) or _bits(target.dtype) is None:
        return ()
    if sharding.memory_kind not in (None, "device"):
        return ()
    used = {axis for entry in sharding.spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    sizes = sharding.mesh.shape
    axes = tuple(axis for axis in sharding.mesh.axis_names if axis not in used and sizes[axis] > 1)
    if not axes:
        return ()
    return axes if _processes(_on_replica(sharding, axes, 0)) != _processes(sharding) else ()


def _processes(sharding: NamedSharding) -> set[int]:
    return {device.process_index for device in _by_id(sharding.device_set)}


def _by_id(devices: Iterable[Any]) -> list[jax.Device]:
    return sorted(devices, key=lambda device: device.id)


def _count(sharding: NamedSharding, axes: tuple[str, ...]) -> int:
    return int(np.prod([sharding.mesh.shape[axis] for axis in axes]))


def _on_replica(sharding: NamedSharding, axes: tuple[str, ...], replica: int) -> NamedSharding:
    mesh = sharding.mesh
    sizes = tuple(mesh.shape[axis] for axis in axes)
    position = dict(zip(axes, (int(place) for place in np.unravel_index(replica, sizes)), strict=True))
    selected = tuple(
        slice(position[axis], position[axis] + 1) if axis in position else slice(None) for axis in mesh.axis_names
    )
    return NamedSharding(Mesh(mesh.devices[selected], mesh.axis_names, axis_types=mesh.axis_types), sharding.spec)


def _bits(dtype: Any) -> Any:
    """The unsigned integers of the same size; None if there are none."""
    if dtype == jnp.bool_:
        return jnp.bool_
    info = jnp.iinfo(dtype) if jnp.issubdtype(dtype, jnp.integer) else jnp.finfo(dtype)
    return {8: jnp.uint8, 16: jnp.uint16, 32: jnp.uint32}.get(info.bits)


@functools.cache
def _sum_bits(sharding: NamedSharding) -> Any:
    """Sums the copies, all but one of which are zero, as integers: a sum of floats would change the sign of -0."""

    def add(copies: jax.Array) -> jax.Array:
        if copies.dtype == jnp.bool_:
            return copies.any(0)
        bits = jax.lax.bitcast_convert_type(copies, _bits(copies.dtype))
        return jax.lax.bitcast_convert_type(bits.sum(0, dtype=bits.dtype), copies.dtype)

    return jax.jit(add, out_shardings=sharding, donate_argnums=0)
