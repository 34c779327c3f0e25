"""Where a call runs: the platform it is compiled for, and how its arrays are sharded over the mesh."""

import dataclasses
import math
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh

# Mesh axes over which one dimension is sharded.
Entry: TypeAlias = str | tuple[str, ...] | None

# Compute capability by device name, for GPUs that are not attached: their descriptions do not state it.
CAPABILITIES = {"A100": "8.0", "H100": "9.0", "H200": "9.0", "B200": "10.0"}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a call, which may differ from the devices of this process (AOT compilation)."""

    platform: str
    """cpu, gpu or tpu."""
    mesh: jax.sharding.Mesh | AbstractMesh | None
    """None: one device."""
    batch: Entry
    heads: Entry
    kv_heads: Entry
    length: Entry = None
    """Mesh axes over which sequences are sharded along their length."""
    context: str = "auto"
    """How attention computes such sequences: a strategy of kernels/attention/context.py."""

    @classmethod
    def here(cls) -> "Placement":
        """One device of the platform that JAX runs on."""
        return cls(jax.default_backend(), None, None, None, None)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size

    def shards(self, entry: Entry) -> int:
        """Number of shards of a dimension."""
        if self.mesh is None or entry is None:
            return 1
        axes = (entry,) if isinstance(entry, str) else entry
        return math.prod(self.mesh.shape[axis] for axis in axes)

    @property
    def capability(self) -> str | None:
        """Compute capability of the mesh's NVIDIA GPUs, of this host's for a mesh without devices; else None."""
        if self.platform != "gpu":
            return None
        device: Any = None if self.mesh is None else self.mesh.abstract_mesh.abstract_device
        if device is None:
            return capability()
        if isinstance(self.mesh, jax.sharding.Mesh) and hasattr(self.mesh.devices.flat[0], "compute_capability"):
            return self.mesh.devices.flat[0].compute_capability
        return next((value for name, value in CAPABILITIES.items() if name in device.device_kind), None)


def capability() -> str | None:
    """Compute capability of this host's GPUs; None if it has none."""
    device: Any = jax.devices()[0]
    return device.compute_capability if device.platform == "gpu" else None


def num_multiprocessors() -> int:
    """Streaming multiprocessors of this host's GPU; those of an H100 or H200 if kernels are only lowered here."""
    device: Any = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
