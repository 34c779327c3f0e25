"""Random initial values of weights, most of them from one compiled sampler.

Each distinct shape of random numbers takes XLA a tenth of a second to compile, and a model has dozens of them. With
partitionable threefry the number at flat index i depends on the key and i alone, so a longer sample starts with the
shorter one: small weights are slices of a padded sample of all their keys, with the values that they would have alone.
"""

import math
from functools import cached_property, reduce

import jax
import jax.numpy as jnp
import numpy as np

# Numbers that are folded into the key of the model, one after another.
KeyPath = tuple[int, ...]
# Number of random values of each weight; 0 if the weight uses its key in another way.
Sizes = dict[KeyPath, int]

# Values of the padded sample: 16 MiB, which every device of a mesh holds.
MAX_VALUES = 2**22


class WeightSampler:
    """Keys and normal values by key path.

    Without a key all values are zeros, and the sizes are recorded for a later sampler with a key: shapes need no
    sampling, which takes most of the time of tracing. Without recorded sizes each weight is sampled alone.
    """

    def __init__(self, key: jax.Array | None, sizes: Sizes):
        self._key, self._sizes = key, sizes
        self._rows = {path: row for row, path in enumerate(sizes)}

    def key(self, path: KeyPath, *, size: int = 0) -> jax.Array | None:
        """Key of a weight; None without a key of the model."""
        if self._key is None:
            self._sizes[path] = size
            return None
        if path not in self._rows:
            return reduce(jax.random.fold_in, path, self._key)
        return self._keys[self._rows[path]]

    def normal(self, path: KeyPath, shape: tuple[int, ...], *, std: float) -> jax.Array:
        """Normal values in float32."""
        # XLA folds the two factors of std * jax.random.normal(...) in the same way.
        scale, size = np.float32(std) * np.float32(np.sqrt(2)), math.prod(shape)
        if path in self._small:
            return scale * self._small_values[self._small[path], :size].reshape(shape)
        key = self.key(path, size=size)
        return jnp.zeros(shape) if key is None else scale * _unscaled_normal(key, shape)

    @cached_property
    def _keys(self) -> jax.Array:
        """Keys of all recorded paths; the folds of one level compile in the time of one."""
        depth = max(map(len, self._sizes))
        numbers = np.array([[*path, *[-1] * (depth - len(path))] for path in self._sizes])
        assert self._key is not None
        keys = jnp.broadcast_to(self._key, len(numbers))
        for level in numbers.T:
            folded = jax.vmap(jax.random.fold_in)(keys, level.astype(np.uint32))
            keys = jnp.where(level >= 0, folded, keys)
        return keys

    @cached_property
    def _small(self) -> dict[KeyPath, int]:
        """Rows of the padded sample: as many of the smallest weights as fit."""
        if self._key is None:
            return {}
        by_size = sorted((size, path) for path, size in self._sizes.items() if size)
        fitting = [path for row, (size, path) in enumerate(by_size) if (row + 1) * size <= MAX_VALUES]
        return {path: row for row, path in enumerate(fitting)}

    @cached_property
    def _small_values(self) -> jax.Array:
        keys = self._keys[np.array([self._rows[path] for path in self._small])]
        longest = max(self._sizes[path] for path in self._small)
        return jax.vmap(lambda key: _unscaled_normal(key, (longest,)))(keys)


def _unscaled_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The values of jax.random.normal divided by sqrt(2), which is its last operation."""
    lowest = np.nextafter(np.float32(-1), np.float32(0))
    return jax.lax.erf_inv(jax.random.uniform(key, shape, jnp.float32, lowest, 1.0))
