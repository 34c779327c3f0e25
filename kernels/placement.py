"""Where a call runs: the platform it is compiled for, and how its arrays are sharded over the mesh."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import AbstractMesh, PartitionSpec

from maxhydra.kernels.sharded_vjp import axes_of, differentiable_shard_map

R = TypeVar("R")

# Mesh axes over which one dimension is sharded.
Entry: TypeAlias = str | tuple[str, ...] | None

# Compute capability by device name, for GPUs that are not attached: their descriptions do not state it.
CAPABILITIES = {"A100": "8.0", "H100": "9.0", "H200": "9.0", "B200": "10.0"}


# Dimensions of operands that a mesh may split, and the name under which capability tables list each.
DIMENSIONS = {
    "batch": "batch",
    "length": "length",
    "stream_length": "length",
    "heads": "heads",
    "kv_heads": "heads",
    "vocab": "vocab",
    "experts": "experts",
}


@dataclasses.dataclass(frozen=True)
class Placement:
    """The devices of a call, which may differ from the devices of this process (AOT compilation).

    The entries of DIMENSIONS name the mesh axes over which the call's arrays are split. Axes over which the caller has
    already mapped the computation (an enclosing `shard_map`) do not count: there arrays are local.
    """

    platform: str
    """cpu, gpu or tpu."""
    mesh: jax.sharding.Mesh | AbstractMesh | None = None
    """None: one device."""
    batch: Entry = None
    heads: Entry = None
    kv_heads: Entry = None
    length: Entry = None
    """Tokens of a sequence inside attention and feed-forward."""
    stream_length: Entry = None
    """Tokens of a sequence in the residual stream, between the branches of a block."""
    vocab: Entry = None
    experts: Entry = None
    context: str = "auto"
    """How attention computes sequences that are split along their length: a strategy of kernels/attention/context.py.
    """

    @classmethod
    def here(cls) -> "Placement":
        """One device of the platform that JAX runs on."""
        return cls(jax.default_backend())

    @property
    def free_axes(self) -> tuple[str, ...]:
        """Mesh axes that no enclosing shard_map has mapped yet; none if that leaves one device."""
        if self.mesh is None or self.mesh.size == 1:
            return ()
        manual = jax.sharding.get_abstract_mesh().manual_axes
        axes = tuple(axis for axis in self.mesh.axis_names if axis not in manual)
        return axes if any(self.mesh.shape[axis] > 1 for axis in axes) else ()

    def spec(self, *dimensions: str | None) -> PartitionSpec:
        """The PartitionSpec of an array, by the name of each of its dimensions; None: not split."""
        return PartitionSpec(*(None if name is None else self._entry(name) for name in dimensions))

    def num_shards(self, dimension: str) -> int:
        """Number of shards of a dimension."""
        return 1 if self.mesh is None else math.prod(self.mesh.shape[axis] for axis in axes_of(self._entry(dimension)))

    def splits(self, *dimensions: str) -> tuple[str, ...]:
        """Which of the dimensions are split over several devices, as capability tables name them."""
        return tuple(dict.fromkeys(DIMENSIONS[name] for name in dimensions if self.num_shards(name) > 1))

    def dividing(self, **sizes: int) -> "Placement":
        """This placement without the entries whose number of shards does not divide the dimension's size."""
        dropped: dict[str, Any] = {name: None for name, size in sizes.items() if size % self.num_shards(name)}
        return dataclasses.replace(self, **dropped) if dropped else self

    def shard_map(self, run: Callable[..., R], in_specs: Any, out_specs: Any) -> Callable[..., R]:
        """Map a function of arrays over the devices: each calls it with its local shards.

        Returns `run` itself on one device and inside a shard_map over all axes. An axis that splits an input must split
        every output. Unlike the gradient of `jax.shard_map`, this one does not sum over axes that split nothing, which
        would move arrays that all devices have already.
        """
        assert isinstance(in_specs, tuple)
        return differentiable_shard_map(self._mapped, run, in_specs, out_specs) if self.free_axes else run

    def manual(self, run: Callable[..., R], in_specs: Any, out_specs: Any) -> Callable[..., R]:
        """Map a function with collectives of its own, and without a gradient, over the devices; see `shard_map`."""
        return self._mapped(run, in_specs=in_specs, out_specs=out_specs) if self.free_axes else run

    @property
    def _mapped(self) -> Callable[..., Any]:
        """`jax.shard_map` over the free axes; inside another shard_map over the mesh of that context."""
        context = jax.sharding.get_abstract_mesh()
        mesh = context if context.manual_axes else self.mesh
        return partial(jax.shard_map, mesh=mesh, axis_names=frozenset(self.free_axes), check_vma=False)

    def _entry(self, dimension: str) -> Entry:
        """Free mesh axes of a dimension."""
        axes = tuple(axis for axis in axes_of(getattr(self, dimension)) if axis in self.free_axes)
        return axes if len(axes) > 1 else axes[0] if axes else None

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
