"""Device meshes: devices with fast links along the last axes, slices along the first."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType

from maxhydra.config.schema.mesh import AXES, Mesh
from maxhydra.sharding.axes import axis_sizes

# The compiler propagates shardings from parameters and constraints to everything else.
AXIS_TYPES = (AxisType.Auto,) * len(AXES)


def build_mesh(mesh: Mesh, devices: Sequence[jax.Device] | None = None) -> jax.sharding.Mesh:
    """The mesh over `devices` (all of them by default), with every axis of AXES in order."""
    grid = device_grid(mesh, jax.devices() if devices is None else devices)
    return jax.sharding.Mesh(grid, AXES, axis_types=AXIS_TYPES)


def device_grid(mesh: Mesh, devices: Sequence[Any]) -> np.ndarray:
    """Devices arranged by their index along each axis of AXES.

    An axis that spans both networks has the slices outermost, so that each slice holds a contiguous run of it, as in
    jax's `create_hybrid_device_mesh`, which supports only devices with a slice index, not simulated slices.
    """
    ordered = sorted(devices, key=lambda device: (_slice_of(device), device.process_index, device.id))
    slices = mesh.slices or len({_slice_of(device) for device in ordered})
    sizes = axis_sizes(mesh, devices=len(ordered), slices=slices)
    per_slice = len(ordered) // slices
    blocks = [
        create_device_mesh(sizes.within, ordered[start : start + per_slice], allow_split_physical_axes=True)
        for start in range(0, len(ordered), per_slice)
    ]
    interleaved = [axis + offset for axis in range(len(AXES)) for offset in (0, len(AXES))]
    return np.stack(blocks).reshape(sizes.across + sizes.within).transpose(interleaved).reshape(sizes.total)


def remeshed(mesh: Mesh, devices: np.ndarray) -> jax.sharding.Mesh:
    """Another mesh over the devices of an existing one, in the same order: one program can use both."""
    sizes = device_grid(mesh, devices.flatten().tolist()).shape
    return jax.sharding.Mesh(devices.reshape(sizes), AXES, axis_types=AXIS_TYPES)


def abstract_mesh(mesh: Mesh, *, devices: int, slices: int) -> AbstractMesh:
    """The mesh without devices: enough to plan for any number of devices on a laptop."""
    return AbstractMesh(axis_sizes(mesh, devices=devices, slices=slices).total, AXES, axis_types=AXIS_TYPES)


def _slice_of(device: Any) -> int:
    """Index of the device's slice; platforms without slices (CPU) have one."""
    return getattr(device, "slice_index", None) or 0
