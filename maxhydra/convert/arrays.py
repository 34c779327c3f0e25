"""Host copies of slices of a model's parameters, from memory or from an external checkpoint."""

import itertools
from typing import Any, Protocol

import jax
import numpy as np

from maxhydra.convert.param_map import Keys, ParamMapping, TensorIndex
from maxhydra.convert.source import Source
from maxhydra.convert.stream_in import checked_mappings, read_arrays
from maxhydra.model import ModelDef

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
