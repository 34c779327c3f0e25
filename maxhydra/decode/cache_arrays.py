"""The arrays of a KV cache on a mesh: size and dtype, shapes, shardings, and the empty cache."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.decode import Engine as Config
from maxhydra.decode.page_pool import Capacity
from maxhydra.layers import PagedCacheSpec
from maxhydra.sharding import Sharder

Tree = Any
CACHE_DTYPES = {
    CacheDtype.auto: None,
    CacheDtype.float32: jnp.dtype(jnp.float32),
    CacheDtype.bfloat16: jnp.dtype(jnp.bfloat16),
    CacheDtype.int8: jnp.dtype(jnp.int8),
    CacheDtype.float8: jnp.dtype(jnp.float8_e4m3fn),
}


def make_cache_spec(config: Config, capacity: Capacity, groups: int) -> PagedCacheSpec:
    """The cache of an engine whose batch is sharded over this many groups of devices."""
    storage, size = CACHE_DTYPES[config.cache_dtype], config.page_size
    return PagedCacheSpec(capacity.num_pages, size, slots=capacity.num_slots, storage=storage, groups=groups)


class CacheArrays:
    """Describes the cache that `make` returns for a spec."""

    def __init__(self, make: Callable[[PagedCacheSpec], Tree], spec: PagedCacheSpec, sharder: Sharder):
        self._make, self._spec = make, spec
        shapes = jax.eval_shape(lambda: make(spec))
        self.axes = map_caches(lambda cache: cache.axes(), shapes)
        """Logical axes."""
        self.shardings = sharder.tree(self.axes)
        self.abstract = jax.tree.map(abstract_array, shapes, self.shardings)

    def empty(self) -> Tree:
        """Allocate an empty cache on the devices."""
        return jax.jit(lambda: self._make(self._spec), out_shardings=self.shardings)()


def map_caches(function: Callable[..., Any], *caches: Tree) -> Tree:
    """Apply a function to the caches of all blocks."""
    return jax.tree.map(function, *caches, is_leaf=lambda node: not isinstance(node, (dict, list)))


def abstract_array(leaf: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
    """An array's shape and dtype with a sharding."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
