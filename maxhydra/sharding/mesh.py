"""Device meshes: sizes of the axes, devices with fast links along the last axes, slices along the first.

A size of -1 is filled in; sizes whose product is not the number of devices are rejected.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AbstractMesh, AxisType

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import AXES, Axes, Mesh


@dataclasses.dataclass(frozen=True)
class AxisSizes:
    """Devices along each axis of AXES, within a slice and across slices."""

    within: tuple[int, ...]
    across: tuple[int, ...]

    @property
    def total(self) -> tuple[int, ...]:
        """Size of each mesh axis, which spans both networks."""
        return tuple(inner * outer for inner, outer in zip(self.within, self.across, strict=True))


def axis_sizes(mesh: Mesh, *, devices: int, slices: int) -> AxisSizes:
    """Fill in the -1 of each network; ConfigError if the sizes do not multiply to the number of devices."""
    if devices % slices:
        fits = ", ".join(str(n) for n in range(1, devices + 1) if devices % n == 0)
        reason = f"{devices} devices do not form {slices} equal slices"
        raise ConfigError(Problem("mesh.slices", reason, value=slices, accepted=fits))
    per_slice = devices // slices
    have = f"{per_slice} device{'s' * (per_slice > 1)}{' in a slice' * (slices > 1)}"
    problems: list[Problem] = []
    within = _fill(mesh, _Network("mesh", per_slice, have, "mesh.fsdp=-1"), problems)
    remedy = "mesh.dcn.data=-1, or mesh.slices=1 to treat them as one"
    across = _fill(mesh.dcn, _Network("mesh.dcn", slices, f"{slices} slice{'s' * (slices > 1)}", remedy), problems)
    if problems:
        raise ConfigError(problems)
    return AxisSizes(within=within, across=across)


@dataclasses.dataclass(frozen=True)
class _Network:
    """The device count that the sizes of one set of axes must multiply to, and texts for messages about it."""

    prefix: str
    count: int
    have: str
    remedy: str


def _fill(axes: Axes, network: _Network, problems: list[Problem]) -> tuple[int, ...]:
    """Sizes of one network with the -1 filled in; a mismatch with the device count is added to `problems`."""
    sizes = {axis: getattr(axes, axis) for axis in AXES}
    automatic = next((axis for axis, size in sizes.items() if size == -1), None)
    explicit = {axis: size for axis, size in sizes.items() if size != -1}
    total = math.prod(explicit.values())
    if automatic is None and total != network.count:
        problems.append(_size_mismatch(explicit, network))
    if automatic is not None and network.count % total:
        problems.append(_not_divisible(explicit, automatic, network))
    filled = {automatic: network.count // total} if automatic is not None else {}
    return tuple({**sizes, **filled}.values())


def _size_mismatch(sizes: dict[str, int], network: _Network) -> Problem:
    """The problem that no axis is -1 and the sizes do not multiply to the device count."""
    prefix, count = network.prefix, network.count
    if math.prod(sizes.values()) == 1:
        path = network.remedy.partition("=")[0]
        reason = f"every axis of {prefix} is 1, but there are {network.have}"
        return Problem(path, reason, value=1, accepted=f"{count}, or -1", hint=f"set {network.remedy}")
    axis, size = _axis_to_change(sizes, count)
    accepted = f"{size}, or -1 for the remaining devices" if size else f"sizes with product {count}, or one of them -1"
    reason = f"{_shown(sizes, prefix)}, but there {'is' if count == 1 else 'are'} {network.have}"
    return Problem(f"{prefix}.{axis}", reason, value=sizes[axis], accepted=accepted)


def _not_divisible(sizes: dict[str, int], automatic: str, network: _Network) -> Problem:
    """The problem that the explicit sizes do not divide the device count, so the -1 axis has no size."""
    prefix, count = network.prefix, network.count
    axis, size = _axis_to_change(sizes, count)
    fits = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
    reason = f"{_shown(sizes, prefix)} does not divide {network.have}, which {prefix}.{automatic}=-1 requires"
    return Problem(
        f"{prefix}.{axis}", reason, value=sizes[axis], accepted=fits or f"sizes whose product divides {count}"
    )


def _axis_to_change(sizes: dict[str, int], count: int) -> tuple[str, int]:
    """The axis whose change alone fixes the mismatch, and its right size; 0 if no single axis does."""
    total = math.prod(sizes.values())
    large = [axis for axis, size in reversed(sizes.items()) if size > 1]
    for axis in large:
        size, rest = divmod(count, total // sizes[axis])
        if rest == 0:
            return axis, size
    return large[0], 0


def _shown(sizes: dict[str, int], prefix: str) -> str:
    """`mesh.fsdp x mesh.tensor = 4 x 3 = 12`."""
    large = {f"{prefix}.{axis}": size for axis, size in sizes.items() if size > 1}
    factors = f" = {' x '.join(map(str, large.values()))}" if len(large) > 1 else ""
    return f"{' x '.join(large)}{factors} = {math.prod(large.values())}"


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


def num_separate_devices(total: int, share: float, *, path: str) -> int:
    """Devices of `total` that do not train: a number, or a fraction under 1; ConfigError if none are left to train."""
    if not share:
        return 0
    count = round(share * total) if share < 1 else int(share)
    if not 0 < count < total or (share >= 1 and count != share):
        accepted = f"a number of devices, 1 to {total - 1}, or a fraction that gives one" if total > 1 else "0"
        reason = f"is not a part of the {total} devices that leaves others for training"
        raise ConfigError(Problem(path, reason, value=share, accepted=accepted))
    return count


def split_devices(
    devices: Sequence[jax.Device], share: float, *, path: str
) -> tuple[Sequence[jax.Device], Sequence[jax.Device]]:
    """The devices that train, and the others: the last ones, or none. `path`: the key of `share`."""
    training = len(devices) - num_separate_devices(len(devices), share, path=path)
    return devices[:training], devices[training:]


def abstract_mesh(mesh: Mesh, *, devices: int, slices: int) -> AbstractMesh:
    """The mesh without devices: enough to plan for any number of devices on a laptop."""
    return AbstractMesh(axis_sizes(mesh, devices=devices, slices=slices).total, AXES, axis_types=AXIS_TYPES)


def _slice_of(device: Any) -> int:
    """Index of the device's slice; platforms without slices (CPU) have one."""
    return getattr(device, "slice_index", None) or 0
