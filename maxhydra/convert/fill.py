"""Tensors of another project into our tree: one at a time, turned, and straight into the shards where they belong."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.convert.facts import require_same
from maxhydra.convert.source import Source
from maxhydra.convert.table import Table, Weight
from maxhydra.model import ModelDef

Tree = Any
Keep = Callable[[tuple[str, ...], jax.Array], Tree]


def as_it_is(keys: tuple[str, ...], weight: jax.Array) -> Tree:
    return weight


@dataclasses.dataclass(frozen=True)
class Place:
    """An array of our tree: its row in the table, and the layers that it holds, stacked (None: no layers)."""

    keys: tuple[str, ...]
    weight: Weight
    layers: tuple[int | None, ...]
    is_stacked: bool
    shape: tuple[int, ...]
    """Of one layer."""

    @property
    def is_turned(self) -> bool:
        return len(self.shape) > 1 and self.weight.inputs > 0

    @property
    def their_shape(self) -> tuple[int, ...]:
        if not self.is_turned:
            return self.shape
        return math.prod(self.shape[self.weight.inputs :]), math.prod(self.shape[: self.weight.inputs])

    def turned(self, theirs: np.ndarray) -> np.ndarray:
        """One tensor in our layout."""
        return theirs.T.reshape(self.shape) if self.is_turned else theirs

    def turned_back(self, ours: np.ndarray) -> np.ndarray:
        """One layer's array in theirs."""
        return np.ascontiguousarray(ours.reshape(self.their_shape[::-1]).T) if self.is_turned else ours


def fill(source: Source, model: ModelDef, *, shardings: Tree, dtype: DTypeLike, keep: Keep = as_it_is) -> Tree:
    """The weights of a source as the model's tree. The host holds one tensor at a time besides what its devices do.

    `keep`: keys and a weight -> what becomes of it.
    """
    require_same(source.facts, model.config, location=source.location)
    found = places(source.table, model)
    if found is None:
        raise source.problem("is of a family that has no such layers as the model has")
    wanted = {source.name(place.weight, layer): place.their_shape for place in found for layer in place.layers}
    source.require_exactly(wanted)
    params: Tree = {}
    for place in found:
        sharding = _below(shardings, place.keys)
        inner = params
        for key in place.keys[:-1]:
            inner = inner.setdefault(key, {})
        inner[place.keys[-1]] = keep(place.keys, _array(source, place, sharding, np.dtype(dtype)))
    return params


def on_first_device(model: ModelDef) -> Tree:
    """Shardings that split nothing."""
    alone = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec())
    return jax.tree.map(lambda _: alone, model.shapes)


def places(table: Table, model: ModelDef) -> list[Place] | None:
    """Every array of the model, in the tree's order; None where the table has no row for one."""
    found = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(model.shapes):
        keys = tuple(entry.key for entry in path)
        layers = _layers(keys, leaf.shape, model)
        tail = "/".join(keys if layers is None else keys[2:])
        weight = table.weight(tail, is_layer=layers is not None)
        if weight is None:
            return None
        is_stacked = keys[0] == "pattern"
        found.append(Place(keys, weight, layers or (None,), is_stacked, leaf.shape[1:] if is_stacked else leaf.shape))
    return found


def _below(shardings: Tree, keys: tuple[str, ...]) -> NamedSharding:
    for key in keys:
        shardings = shardings[key]
    assert isinstance(shardings, NamedSharding)
    return shardings


def _layers(keys: tuple[str, ...], shape: tuple[int, ...], model: ModelDef) -> tuple[int, ...] | None:
    """Numbers of the layers that an array holds; None at the two ends of the model."""
    if keys[0] not in ("prefix", "pattern", "remainder"):
        return None
    place, before = int(keys[1]), len(model.config.prefix)
    if keys[0] == "prefix":
        return (place,)
    if keys[0] == "remainder":
        return (model.config.num_layers - len(model.shapes["remainder"]) + place,)
    return tuple(before + place + repetition * len(model.shapes["pattern"]) for repetition in range(shape[0]))


def _array(source: Source, place: Place, sharding: NamedSharding, dtype: np.dtype) -> jax.Array:
    if not place.is_stacked:
        return _sharded(_turned(source, place, place.layers[0], dtype), sharding)
    shape = (len(place.layers), *place.shape)
    one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
    stack = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding)()
    # Layer by layer into a stack that stays on the devices: a host need not hold the layers of a large model at once.
    insert = jax.jit(jax.lax.dynamic_update_index_in_dim, static_argnums=3, donate_argnums=0, out_shardings=sharding)
    for index, layer in enumerate(place.layers):
        stack = insert(stack, _sharded(_turned(source, place, layer, dtype), one), np.int32(index), 0)
    return stack


def _turned(source: Source, place: Place, layer: int | None, dtype: np.dtype) -> np.ndarray:
    """One tensor in our layout."""
    theirs = source.read(source.name(place.weight, layer)).astype(dtype)
    if source.is_gguf and place.weight.gguf_is_interleaved:
        *_, heads, size = place.shape
        theirs = theirs.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(theirs.shape)
    return place.turned(theirs)


def _sharded(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
