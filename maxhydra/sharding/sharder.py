"""Logical axis names to shardings: the one place where a rule of `mesh.rules` becomes a PartitionSpec."""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple, TypeAlias

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.config import ConfigError, Problem
from maxhydra.config.schema.hardware import AXES, DATA, REPLICA, RULES, STAGE, Mesh
from maxhydra.sharding.mesh import AXIS_TYPES, build_mesh
from maxhydra.sharding.pipeline import PipelineSchedule, plan_schedule

# One logical axis name per dimension of an array, or None for a dimension that is never sharded.
LogicalAxes: TypeAlias = tuple[str | None, ...]


def is_axes(node: Any) -> bool:
    """Whether a node of a tree holds the axes of one array. A NamedTuple or a tuple of trees (optax) does not."""
    return type(node) is tuple and all(name is None or isinstance(name, str) for name in node)


class MeshOptions(NamedTuple):
    """Keys of the section `mesh` that choose how an axis is used."""

    context: str = "auto"
    """Strategy of attention over sequences that are sharded along their length (`mesh.context`)."""
    microbatches: int | None = None
    """As in `mesh.pipeline`."""
    repeats: int = 1


@dataclasses.dataclass(frozen=True, init=False)
class Sharder:
    """Shardings over one mesh by one set of rules; hashable, so it can be a static field or argument of a jit."""

    mesh: jax.sharding.Mesh | AbstractMesh
    rules: tuple[tuple[str, tuple[str, ...]], ...]
    options: MeshOptions

    def __init__(
        self,
        mesh: jax.sharding.Mesh | AbstractMesh,
        rules: Mapping[str, Sequence[str]],
        options: MeshOptions | None = None,
    ):
        object.__setattr__(self, "mesh", mesh)
        # Rules of older configs lack the logical axes that were added since.
        every = {**RULES, **rules}
        object.__setattr__(self, "rules", tuple((name, tuple(axes)) for name, axes in sorted(every.items())))
        object.__setattr__(self, "options", options or MeshOptions())

    @classmethod
    def from_config(cls, config: Mesh, mesh: jax.sharding.Mesh | AbstractMesh | None = None) -> "Sharder":
        """The sharder of the section `mesh` of a config, over a mesh of all devices by default."""
        options = MeshOptions(config.context.value, config.pipeline.microbatches, config.pipeline.repeats)
        return cls(build_mesh(config) if mesh is None else mesh, config.rules, options)

    @classmethod
    def single(cls) -> "Sharder":
        """A sharder for one device: every spec is empty and `constrain` returns its input."""
        return cls(AbstractMesh((1,) * len(AXES), AXES, axis_types=AXIS_TYPES), RULES)

    @property
    def platform(self) -> str:
        """Platform of the mesh's devices, which may differ from the local one; the local one for an abstract mesh."""
        device = self.mesh.abstract_mesh.abstract_device
        return jax.default_backend() if device is None else device.platform

    @property
    def stages(self) -> int:
        """Number of pipeline stages; 1 inside a stage, where the axis shards nothing."""
        return 1 if STAGE in self.mesh.abstract_mesh.manual_axes else self.mesh.shape[STAGE]

    def pipeline_schedule(self, rows: int) -> PipelineSchedule:
        """The schedule of a forward pass over this many sequences; ConfigError if they do not form microbatches."""
        row_shards = math.prod(self.mesh.shape[axis] for axis in self.mesh_axes("act_batch") if axis != STAGE)
        return plan_schedule(
            stages=self.stages,
            repeats=self.options.repeats,
            microbatches=self.options.microbatches,
            rows=rows,
            row_shards=row_shards,
        )

    def inside_stage(self) -> "Sharder":
        """The sharder within one pipeline stage: shardings over the other axes of the mesh."""
        return self._inside(STAGE)

    def inside_replica(self) -> "Sharder":
        """The sharder within one DiLoCo replica; the same one if there is only one replica."""
        return self if self.mesh.shape[REPLICA] == 1 else self._inside(REPLICA)

    def _inside(self, mapped: str) -> "Sharder":
        mesh = self.mesh.abstract_mesh.update_axis_types({mapped: AxisType.Manual})
        rules = {name: [axis for axis in axes if axis != mapped] for name, axes in self.rules}
        return Sharder(mesh, rules, self.options)

    def mesh_axes(self, name: str) -> tuple[str, ...]:
        """Mesh axes of more than one device over which a logical axis is sharded."""
        return self._mesh_axes[name]

    @cached_property
    def _mesh_axes(self) -> dict[str, tuple[str, ...]]:
        sizes = self.mesh.shape
        return {name: tuple(axis for axis in axes if sizes[axis] > 1) for name, axes in self.rules}

    def num_shards(self, name: str) -> int:
        """Number of shards of a logical axis; that of act_batch must divide the batch."""
        return math.prod(self.mesh.shape[axis] for axis in self.mesh_axes(name))

    def spec(self, axes: LogicalAxes) -> PartitionSpec:
        """The PartitionSpec of an array. A mesh axis can shard only one dimension: the first that maps to it."""
        used: set[str] = set()
        entries: list[str | tuple[str, ...] | None] = []
        for name in axes:
            free = () if name is None else tuple(axis for axis in self.mesh_axes(name) if axis not in used)
            used.update(free)
            entries.append(free if len(free) > 1 else free[0] if free else None)
        return PartitionSpec(*entries)

    def spec_over_data(self, axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
        """The spec of a matrix with the axis `data` added to the first dimension that it divides, a sharded one if any.

        Sharded over two dimensions, gradients would be all-reduced: the compiler scatters them over one only.
        Vectors, matrices that no dimension of fits, and arrays that `data` shards already have the usual spec.
        """
        spec, size = self.dividing_spec(axes, shape), self.mesh.shape[DATA]
        is_matrix = sum(name != "layers" for name in axes) > 1
        if size == 1 or not is_matrix or any(DATA in _names(entry) for entry in spec):
            return spec
        for dimension, entry in sorted(enumerate(spec), key=lambda item: item[1] is None):
            names = (*_names(entry), DATA)
            if (
                axes[dimension] != "layers"
                and shape[dimension] % math.prod(self.mesh.shape[axis] for axis in names) == 0
            ):
                return PartitionSpec(*spec[:dimension], names if len(names) > 1 else DATA, *spec[dimension + 1 :])
        return spec

    def sharding(self, axes: LogicalAxes) -> NamedSharding:
        return NamedSharding(self.mesh, self.spec(axes))

    def tree(self, axes_tree: Any) -> Any:
        """A tree of logical axes mapped to a tree of shardings."""
        return jax.tree.map(self.sharding, axes_tree, is_leaf=is_axes)

    def constrain(self, x: jax.Array, *axes: str | None) -> jax.Array:
        """Constrain the sharding of a value to these logical axes."""
        if len(axes) != x.ndim:
            raise ValueError(f"{len(axes)} logical axes {axes} for a value of shape {x.shape}")
        if self.mesh.size == 1:
            return x
        return jax.lax.with_sharding_constraint(x, self.sharding(axes))

    def replicate(self, tree: Any) -> Any:
        """Constrain all values of a tree to be whole on every device."""
        return jax.tree.map(lambda x: self.constrain(x, *[None] * x.ndim), tree)

    def dividing_spec(self, axes: LogicalAxes, shape: Sequence[int]) -> PartitionSpec:
        """The spec of an array without the mesh axes that do not divide their dimension."""
        sizes = [math.prod(self.mesh.shape[axis] for axis in _names(entry)) for entry in self.spec(axes)]
        entries = zip(self.spec(axes), shape, sizes, strict=True)
        return PartitionSpec(*(entry if size % shards == 0 else None for entry, size, shards in entries))

    def reshard(self, x: jax.Array, axes: LogicalAxes, *, gradient: LogicalAxes) -> jax.Array:
        """As `constrain`, with other logical axes for the gradient of the value."""
        if self.spec(axes) == self.spec(gradient):
            return self.constrain(x, *axes)
        return _reshard(self.sharding(axes), self.sharding(gradient), x)

    def divides(self, axes: LogicalAxes, shape: Sequence[int]) -> bool:
        """Whether the mesh axes of every dimension divide it."""
        return not any(
            size % math.prod(self.mesh.shape[axis] for axis in _names(entry))
            for size, entry in zip(shape, self.spec(axes), strict=True)
        )

    def check(self, axes_tree: Any, shapes_tree: Any) -> None:
        """Raise one ConfigError that lists every dimension that is not divisible by its mesh axes."""
        misfits: dict[tuple[tuple[str, ...], str, int], list[str]] = defaultdict(list)

        def visit(path: jax.tree_util.KeyPath, axes: LogicalAxes, array: Any) -> None:
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            if len(axes) != len(array.shape):
                raise ValueError(f"{where} has axes {axes} and shape {array.shape}")
            for name, size, entry in zip(axes, array.shape, self.spec(axes), strict=True):
                split = _names(entry)
                if size % math.prod(self.mesh.shape[axis] for axis in split):
                    misfits[split, str(name), size].append(where)

        jax.tree_util.tree_map_with_path(visit, axes_tree, shapes_tree, is_leaf=is_axes)
        if misfits:
            raise ConfigError([self._misfit(*key, arrays) for key, arrays in misfits.items()])

    def _misfit(self, split: tuple[str, ...], name: str, size: int, arrays: list[str]) -> Problem:
        ways = math.prod(self.mesh.shape[axis] for axis in split)
        shown = " x ".join(f"{axis}={self.mesh.shape[axis]}" for axis in split)
        axis = max(split, key=lambda axis: size % self.mesh.shape[axis])
        divisor = math.gcd(size, math.prod(self.mesh.axis_sizes))
        fits = ", ".join(str(n) for n in range(1, divisor + 1) if divisor % n == 0)
        sizes = f" ({shown}, {ways} shards)" if len(split) > 1 else ""
        return Problem(
            f"mesh.{axis}",
            f"does not divide {name}={size} of {', '.join(arrays)}{sizes}",
            value=self.mesh.shape[axis],
            accepted=f"{fits}{' in total' if len(split) > 1 else ''}",
            hint=f"or do not shard {name}: mesh.rules.{name}=[]",
        )


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _reshard(forward: NamedSharding, backward: NamedSharding, x: jax.Array) -> jax.Array:
    return _move(x, backward, forward)


_reshard.defvjp(
    lambda forward, backward, x: (_move(x, backward, forward), None),
    lambda forward, backward, _, gradient: (_move(gradient, forward, backward),),
)


def _move(x: jax.Array, source: NamedSharding, target: NamedSharding) -> jax.Array:
    """Constrain a value to `target`.

    A value that is gathered is first constrained to where it comes from: the partitioner could otherwise gather the
    operands of the operation before, such as the float32 input of a conversion. One that is scattered is not: it may be
    a partial sum.
    """
    if _num_shards(target) < _num_shards(source):
        x = jax.lax.with_sharding_constraint(x, source)
    return jax.lax.with_sharding_constraint(x, target)


def _num_shards(sharding: NamedSharding) -> int:
    return math.prod(sharding.mesh.shape[axis] for entry in sharding.spec for axis in _names(entry))


def bytes_per_device(
    shape: Sequence[int], dtype: DTypeLike, spec: PartitionSpec, mesh: jax.sharding.Mesh | AbstractMesh
) -> int:
    """Bytes of the largest shard of an array."""
    ways = [math.prod(mesh.shape[axis] for axis in _names(entry)) for entry in spec]
    ways += [1] * (len(shape) - len(ways))
    return math.prod(-(-size // n) for size, n in zip(shape, ways, strict=True)) * np.dtype(dtype).itemsize


def _names(entry: Any) -> tuple[str, ...]:
    """Mesh axes of one entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)
