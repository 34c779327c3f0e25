"""The arrays of a model one part at a time, wherever they are: in memory, or still in files of others."""

import itertools
from typing import Any, Protocol

import jax
import numpy as np
from jax.typing import DTypeLike

from maxhydra.convert.load import load_weights, open_external
from maxhydra.convert.param_map import Keys, Place, Tensor
from maxhydra.convert.source import Source
from maxhydra.convert.stream_in import checked_places, read
from maxhydra.model import ModelDef

Index = tuple[int, ...]


class Arrays(Protocol):
    """Host copies of parts of arrays."""

    def counted(self, keys: Keys) -> Index:
        """Sizes of the leading axes by which an array is best taken."""
        ...

    def part(self, keys: Keys, index: Index) -> np.ndarray:
        """What lies at an index of the leading axes of an array."""
        ...


class HeldArrays:
    """Those of a tree of weights."""

    def __init__(self, params: Any):
        self._params = params

    def counted(self, keys: Keys) -> Index:
        return tuple(self._array(keys).shape[:1]) if keys[0] == "pattern" else ()

    def part(self, keys: Keys, index: Index) -> np.ndarray:
        array = self._array(keys)
        return np.asarray(jax.device_get(array[index] if index else array))

    def _array(self, keys: Keys) -> Any:
        array = self._params
        for key in keys:
            array = array[key]
        return array


class FileArrays:
    """Those that tensors of others hold: each is read when it is asked for, and forgotten."""

    def __init__(self, source: Source, model: ModelDef):
        self._source = source
        self._places: dict[Keys, tuple[Place, int]] = {
            keys: (place, which) for place in checked_places(source, model) for which, keys in enumerate(place.keys)
        }

    def counted(self, keys: Keys) -> Index:
        return self._places[keys][0].counted

    def part(self, keys: Keys, index: Index) -> np.ndarray:
        place, which = self._places[keys]
        counted = place.counted
        if len(index) >= len(counted):
            return self._tensor(place, which, index[: len(counted)])[index[len(counted) :]]
        open_axes = counted[len(index) :]
        inner = [self.part(keys, (*index, *more)) for more in itertools.product(*map(range, open_axes))]
        return np.stack(inner).reshape(*open_axes, *inner[0].shape)

    def _tensor(self, place: Place, which: int, index: Index) -> np.ndarray:
        at = iter(index)
        layer = place.layers[next(at)] if place.is_stacked else place.layers[0]
        expert = None if place.experts is None else next(at)
        return read(self._source, place, Tensor(layer, expert, index))[which]


def open_arrays(key: str, source: str, model: ModelDef, *, dtype: DTypeLike) -> Arrays:
    """The arrays of a source that belongs to the model. Only those of our own checkpoints come into memory at once."""
    found = open_external(key, source)
    if found is not None:
        return FileArrays(found, model)
    return HeldArrays(load_weights(source, model, shardings=None, dtype=dtype, key=key))
