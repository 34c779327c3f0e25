"""Stream an external checkpoint into the parameter tree, one tensor at a time, directly into its shards.

`Arrays` are host copies of slices of a model's parameters, from memory or from an external checkpoint.
"""

import itertools
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from maxhydra.convert.compatibility import require_same
from maxhydra.convert.param_map import Keys, ParamMapping, TensorIndex, map_params, unmapped_params
from maxhydra.convert.source import Source
from maxhydra.model import ModelDef

Tree = Any
# Path and value of a parameter -> the array or arrays to store.
Transform = Callable[[Keys, jax.Array], Tree]
# Parameters up to this many bytes are assembled on the host, which needs no compiled program.
MAX_HOST_BYTES = 2**26


def identity(keys: Keys, weight: jax.Array) -> Tree:
    return weight


def stream_weights(
    source: Source, model: ModelDef, *, shardings: Tree, dtype: DTypeLike, transform: Transform = identity
) -> Tree:
    """Load a source as the model's parameter tree; apart from the shards, the host holds one tensor at a time.

    transform: applied to each parameter once it is complete, e.g. quantization.
    """
    params: Tree = {}
    for mapping in checked_mappings(source, model):
        stacks = [_Stack(mapping, which, _lookup(shardings, keys), dtype) for which, keys in enumerate(mapping.keys)]
        for tensor in mapping.tensors:
            for stack, array in zip(stacks, read_arrays(source, mapping, tensor), strict=True):
                stack.put(tensor.index, array)
        for keys, stack in zip(mapping.keys, stacks, strict=True):
            node = params
            for key in keys[:-1]:
                node = node.setdefault(key, {})
            node[keys[-1]] = transform(keys, stack.finish())
    return params


def checked_mappings(source: Source, model: ModelDef) -> list[ParamMapping]:
    """Map all tensors of a source to parameters; ConfigError unless they match the model exactly."""
    require_same(source, model.config)
    if unmapped := unmapped_params(source.table, model):
        raise source.problem(f"belongs to a model family without {unmapped[0]}")
    mappings = map_params(source.table, model)
    expected = {
        mapping.tensor_name(tensor, is_gguf=source.is_gguf): mapping.layout.hf_shape
        for mapping in mappings
        for tensor in mapping.tensors
    }
    source.require_exactly(expected)
    return mappings


def read_arrays(source: Source, mapping: ParamMapping, tensor: TensorIndex) -> list[np.ndarray]:
    """Read one tensor and split it into the parameters that it holds."""
    row = mapping.row
    interleaved_rope = row.gguf_interleaved_rope if source.is_gguf else row.interleaved_rope
    stored = source.read(mapping.tensor_name(tensor, is_gguf=source.is_gguf))
    return mapping.layout.from_hf(stored, interleaved_rope=interleaved_rope)


def single_device_shardings(model: ModelDef) -> Tree:
    """Shardings that put every parameter on the first device."""
    sharding = NamedSharding(Mesh(np.array(jax.devices()[:1]), ("one",)), PartitionSpec())
    return jax.tree.map(lambda _: sharding, model.shapes)


class _Stack:
    """One parameter, assembled from one or more tensors."""

    def __init__(self, mapping: ParamMapping, which: int, sharding: NamedSharding, dtype: DTypeLike):
        stack_shape = mapping.stack_shape
        self._shape = (*stack_shape, *mapping.layout.shapes[which])
        self._dtype, self._sharding = np.dtype("float32" if mapping.row.dtype else dtype), sharding
        self._slice_sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[len(stack_shape) :]))
        self._host: np.ndarray | None = None
        self._device: jax.Array | None = None
        if math.prod(self._shape) * self._dtype.itemsize <= MAX_HOST_BYTES or not stack_shape:
            self._host = np.empty(self._shape, self._dtype)
        else:
            self._device = jax.jit(lambda: jnp.zeros(self._shape, self._dtype), out_shardings=sharding)()
            self._insert = jax.jit(_insert, donate_argnums=0, out_shardings=sharding)

    def put(self, index: tuple[int, ...], array: np.ndarray) -> None:
        if self._host is not None:
            self._host[index] = array
            return
        # Insert into the array on the devices, so that the host never holds all layers of a large model.
        part = _shard(array.astype(self._dtype), self._slice_sharding)
        self._device = self._insert(self._device, part, np.asarray(index, np.int32))

    def finish(self) -> jax.Array:
        if self._device is not None:
            return self._device
        assert self._host is not None
        host, self._host = self._host, None
        return _shard(host, self._sharding)


def _insert(stack: jax.Array, part: jax.Array, index: jax.Array) -> jax.Array:
    stack_dims = stack.ndim - part.ndim
    start = jnp.concatenate([index, jnp.zeros(part.ndim, index.dtype)])
    return jax.lax.dynamic_update_slice(stack, part.reshape((1,) * stack_dims + part.shape), tuple(start))


def _lookup(shardings: Tree, keys: Keys) -> NamedSharding:
    for key in keys:
        shardings = shardings[key]
    assert isinstance(shardings, NamedSharding)
    return shardings


def _shard(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


Index = tuple[int, ...]


class Arrays(Protocol):
    """Parameters that are read as host arrays, slice by slice."""

    def stack_shape(self, keys: Keys) -> Index:
        """Sizes of the leading axes along which a parameter is cheapest to slice."""
        ...

    def read_slice(self, keys: Keys, index: Index) -> np.ndarray:
        """The slice of a parameter at an index of its leading axes."""
        ...


class InMemoryArrays:
    """Slices of a parameter tree."""

    def __init__(self, params: Any):
        self._params = params

    def stack_shape(self, keys: Keys) -> Index:
        return tuple(self._array(keys).shape[:1]) if keys[0] == "pattern" else ()

    def read_slice(self, keys: Keys, index: Index) -> np.ndarray:
        array = self._array(keys)
        return np.asarray(jax.device_get(array[index] if index else array))

    def _array(self, keys: Keys) -> Any:
        array = self._params
        for key in keys:
            array = array[key]
        return array


class FileArrays:
    """Slices of an external checkpoint; each tensor is read on access and not cached."""

    def __init__(self, source: Source, model: ModelDef):
        self._source = source
        self._mappings: dict[Keys, tuple[ParamMapping, int]] = {
            keys: (mapping, which)
            for mapping in checked_mappings(source, model)
            for which, keys in enumerate(mapping.keys)
        }

    def stack_shape(self, keys: Keys) -> Index:
        return self._mappings[keys][0].stack_shape

    def read_slice(self, keys: Keys, index: Index) -> np.ndarray:
        mapping, which = self._mappings[keys]
        stack_shape = mapping.stack_shape
        if len(index) >= len(stack_shape):
            return self._tensor(mapping, which, index[: len(stack_shape)])[index[len(stack_shape) :]]
        open_axes = stack_shape[len(index) :]
        slices = [self.read_slice(keys, (*index, *rest)) for rest in itertools.product(*map(range, open_axes))]
        return np.stack(slices).reshape(*open_axes, *slices[0].shape)

    def _tensor(self, mapping: ParamMapping, which: int, index: Index) -> np.ndarray:
        axes = iter(index)
        layer = mapping.layers[next(axes)] if mapping.is_stacked else mapping.layers[0]
        expert = None if mapping.experts is None else next(axes)
        return read_arrays(self._source, mapping, TensorIndex(layer, expert, index))[which]
