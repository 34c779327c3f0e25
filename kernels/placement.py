"""Where a call runs: the platform that it is compiled for, and how its arrays lie over the devices there."""

import dataclasses
from typing import Any, TypeAlias

import jax
from jax.sharding import AbstractMesh

# Mesh axes over which one dimension is split.
Entry: TypeAlias = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a call, which need not be those of this process."""

    platform: str
    """cpu, gpu or tpu."""
    mesh: jax.sharding.Mesh | AbstractMesh | None
    """None: one device."""
    batch: Entry
    heads: Entry
    kv_heads: Entry

    @classmethod
    def here(cls) -> "Placement":
        """One device of the platform that JAX runs on."""
        return cls(jax.default_backend(), None, None, None, None)

    @property
    def devices(self) -> int:
        return 1 if self.mesh is None else self.mesh.size


def capability() -> str | None:
    """Compute capability of this host's GPUs; None where there are none."""
    device: Any = jax.devices()[0]
    return device.compute_capability if device.platform == "gpu" else None


def processors() -> int:
    """Of this host's GPU; of an H100 or H200 where there is none and kernels are only lowered."""
    device: Any = jax.devices()[0]
    return device.core_count if device.platform == "gpu" else 132
