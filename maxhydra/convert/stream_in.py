"""Tensors of another project into our tree: one at a time, in our layout, straight into the shards they belong to."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.convert.compatibility import require_same
from maxhydra.convert.param_map import Keys, Place, Tensor, map_params, unmapped_params
from maxhydra.convert.source import Source
from maxhydra.model import ModelDef

Tree = Any
Keep = Callable[[Keys, jax.Array], Tree]
# Bytes of an array that a host may hold whole: put together there, it needs no program.
SMALL = 2**26


def as_it_is(keys: Keys, weight: jax.Array) -> Tree:
    return weight


def fill(source: Source, model: ModelDef, *, shardings: Tree, dtype: DTypeLike, keep: Keep = as_it_is) -> Tree:
    """The weights of a source as the model's tree. The host holds one tensor at a time besides what its devices do.

    `keep`: keys and a weight -> what becomes of it.
    """
    params: Tree = {}
    for place in checked_places(source, model):
        stacks = [_Stack(place, which, _below(shardings, keys), dtype) for which, keys in enumerate(place.keys)]
        for tensor in place.tensors:
            for stack, array in zip(stacks, read(source, place, tensor), strict=True):
                stack.put(tensor.index, array)
        for keys, stack in zip(place.keys, stacks, strict=True):
            inner = params
            for key in keys[:-1]:
                inner = inner.setdefault(key, {})
            inner[keys[-1]] = keep(keys, stack.finished())
    return params


def checked_places(source: Source, model: ModelDef) -> list[Place]:
    """Where everything of a source belongs; ConfigError unless it is this model's, to the last tensor."""
    require_same(source, model.config)
    if missing := unmapped_params(source.table, model):
        raise source.problem(f"is of a family that has no {missing[0]}")
    found = map_params(source.table, model)
    wanted = {
        place.name(tensor, is_gguf=source.is_gguf): place.layout.their_shape
        for place in found
        for tensor in place.tensors
    }
    source.require_exactly(wanted)
    return found


def read(source: Source, place: Place, tensor: Tensor) -> list[np.ndarray]:
    """One tensor as the arrays of ours that it holds."""
    row = place.row
    theirs = source.read(place.name(tensor, is_gguf=source.is_gguf))
    return place.layout.ours(theirs, neighbours=row.gguf_neighbours if source.is_gguf else row.neighbours)


def on_first_device(model: ModelDef) -> Tree:
    """Shardings that split nothing."""
    alone = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec())
    return jax.tree.map(lambda _: alone, model.shapes)


class _Stack:
    """One of our arrays, which takes tensors one at a time."""

    def __init__(self, place: Place, which: int, sharding: NamedSharding, dtype: DTypeLike):
        counted = place.counted
        self._shape = (*counted, *place.layout.shapes[which])
        self._dtype, self._sharding = np.dtype(dtype), sharding
        self._one = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(counted) :]))
        self._host: np.ndarray | None = None
        self._device: jax.Array | None = None
        if math.prod(self._shape) * self._dtype.itemsize <= SMALL or not counted:
            self._host = np.empty(self._shape, self._dtype)
        else:
            self._device = jax.jit(lambda: jnp.zeros(self._shape, self._dtype), out_shardings=sharding)()
            self._insert = jax.jit(_inserted, donate_argnums=0, out_shardings=sharding)

    def put(self, index: tuple[int, ...], array: np.ndarray) -> None:
        if self._host is not None:
            self._host[index] = array
            return
        # Into an array that stays on the devices: a host need not hold the layers of a large model at once.
        part = _sharded(array.astype(self._dtype), self._one)
        self._device = self._insert(self._device, part, np.asarray(index, np.int32))

    def finished(self) -> jax.Array:
        if self._device is not None:
            return self._device
        assert self._host is not None
        host, self._host = self._host, None
        return _sharded(host, self._sharding)


def _inserted(whole: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    counted = whole.ndim - part.ndim
    start = jnp.concatenate([index, jnp.zeros(part.ndim, index.dtype)])
    return jax.lax.dynamic_update_slice(whole, part.reshape((1,) * counted + part.shape), tuple(start))


def _below(shardings: Tree, keys: Keys) -> NamedSharding:
    for key in keys:
        shardings = shardings[key]
    assert isinstance(shardings, NamedSharding)
    return shardings


def _sharded(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])
