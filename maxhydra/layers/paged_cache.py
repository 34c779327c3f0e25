"""The paged KV cache of the decode engine: pages allocated to sequences on demand (Kwon et al., 2023).

Shape letters as in kv_cache.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.kernels.paged_attention import Pages
from maxhydra.layers.kv_cache import (
    KeysValues,
    PageTable,
    SequenceIndex,
    StateCache,
    StateSpec,
    heads_axis,
    join_groups,
    map_groups,
    put_rows,
    take_rows,
)


@dataclasses.dataclass(frozen=True)
class PagedCacheSpec:
    """Pages allocated to sequences on demand (Kwon et al., 2023), and one slot per sequence for states."""

    pages: int
    """Pages of all groups together."""
    page_size: int
    slots: int
    """Slots of all groups together."""
    storage: np.dtype | None
    """Dtype of stored keys and values; None: the compute dtype."""
    groups: int = 1
    """Shards of a batch, each with its own pages and slots; divides both numbers."""

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> "PagedCache":
        storage = dtype if self.storage is None else self.storage
        shape = (self.groups, layers, self.pages // self.groups, kv_heads, self.page_size)
        key, value = (jnp.zeros((*shape, size), storage) for size in (head_dim, value_dim or head_dim))
        scale = jnp.zeros(shape, jnp.float32) if storage in SCALED else None
        return PagedCache(key, value, scale, scale)

    def every(self, tokens: int) -> "PagedCacheSpec":
        """Pages of the same tokens, with fewer entries; the engine checks that the page size is a multiple."""
        return dataclasses.replace(self, page_size=self.page_size // tokens)

    def states(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        """One slot per sequence decoded at a time, in the dtypes of the arrays."""
        shape = (self.groups, layers, self.slots // self.groups)
        return StateCache(
            {name: jnp.zeros((*shape, *spec.shape), spec.dtype) for name, spec in arrays.items()},
            tuple((name, ("act_batch", "layers", None, *spec.axes)) for name, spec in arrays.items()),
        )


# Storage dtypes that need a scale -> their largest value.
SCALED = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of all sequences in one pool of pages per group; a call writes its tokens and reads its pages.

    Only those are touched, so the cost of a step does not depend on the number of pages. Within a page the tokens of a
    head are contiguous, as attention reads them. In 8 bits every token has one scale per head.
    """

    key_GLPKZH: jax.Array
    value_GLPKZH: jax.Array
    key_scale_GLPKZ: jax.Array | None
    value_scale_GLPKZ: jax.Array | None

    def at(self, layer: jax.Array | int) -> "PagedLayer":
        return PagedLayer(self, jnp.asarray(layer), None)

    def with_layer(self, view: "PagedLayer") -> "PagedCache":
        return view.cache

    def axes(self) -> "PagedCache":
        token_axes: Any = ("act_batch", "layers", None, heads_axis(self.key_GLPKZH.shape[3]), None, None)
        scale_axes: Any = None if self.key_scale_GLPKZ is None else token_axes[:5]
        return PagedCache(token_axes, token_axes, scale_axes, scale_axes)

    def take(self, index: SequenceIndex) -> "PagedCache":
        """The pages [L, W, ...] of one sequence."""
        return jax.tree.map(lambda x: take_rows(x, index.group, index.pages_W), self)

    def put(self, taken: "PagedCache", index: SequenceIndex) -> "PagedCache":
        """The cache with the pages of one sequence replaced."""
        return jax.tree.map(lambda x, new: put_rows(x, new, index.group, index.pages_W), self, taken)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """One layer of a paged cache: the whole cache and the layer's index."""

    cache: PagedCache
    layer: jax.Array
    length_B: jax.Array | None
    """Number of tokens of each row after this call's tokens are written."""

    def insert(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> Self:
        """Write tokens to the pages of their rows; negative positions (padding) are not written."""
        assert rows is not None
        Z = self.cache.key_GLPKZH.shape[4]
        page_BT = jnp.take_along_axis(rows.table_BW, jnp.maximum(positions_BT, 0) // Z, axis=1)
        index = (self._mask_pages(positions_BT < 0, page_BT), positions_BT % Z)
        return self._write(index, key_BTKH, value_BTKH, positions_BT)

    def begin(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> Self:
        """`insert` for tokens that start their rows: whole pages are written, in a fraction of the time on a GPU.

        Padding after the tokens fills their last page; it is overwritten before any query can see it.
        """
        assert rows is not None
        Z = self.cache.key_GLPKZH.shape[4]
        W = min(positions_BT.shape[1] // Z, rows.table_BW.shape[1])
        if positions_BT.shape[1] % Z:
            return self.insert(key_BTKH, value_BTKH, positions_BT, rows)
        pages_BW = self._mask_pages(positions_BT[:, : W * Z : Z] < 0, rows.table_BW[:, :W])
        key, value = (x.reshape(x.shape[0], -1, Z, *x.shape[2:])[:, :W].swapaxes(2, 3) for x in (key_BTKH, value_BTKH))
        return self._write((pages_BW,), key, value, positions_BT)

    def _mask_pages(self, is_padding: jax.Array, pages: jax.Array) -> jax.Array:
        """Page indices, with distinct out-of-range ones for padding.

        Distinct, because a GPU scatters several values at a time if it knows that no index occurs twice.
        """
        out_of_range = self.cache.key_GLPKZH.shape[2] + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
        return jnp.where(is_padding, out_of_range, pages)

    def _write(self, index: tuple[jax.Array, ...], key: jax.Array, value: jax.Array, positions_BT: jax.Array) -> Self:
        """The layer with keys and values [..., H] written at pages, or at pages and offsets within them.

        Out-of-range entries are dropped.
        """
        (key, key_scale), (value, value_scale) = (_quantize(x, self.cache.key_GLPKZH.dtype) for x in (key, value))

        def write(old: PagedCache, new: PagedCache, pages: jax.Array, *offsets: jax.Array) -> PagedCache:
            at = (self.layer, pages, slice(None), *offsets)
            return jax.tree.map(lambda x, part: x.at[at].set(part, mode="drop", unique_indices=True), old, new)

        cache = map_groups(write, self.cache, PagedCache(key, value, key_scale, value_scale), *index)
        return dataclasses.replace(self, cache=cache, length_B=jnp.max(positions_BT, axis=1) + 1)

    def pages(self, positions_BT: jax.Array, rows: PageTable | None) -> Pages | None:
        """The rows' pages in place, before this call's tokens are written; None for storage with scales.

        Numbered within a group: a mesh splits pages as it splits rows.
        """
        assert rows is not None
        if self.cache.key_scale_GLPKZ is not None:
            return None
        key, value = (x.reshape(-1, *x.shape[3:]) for x in (self.cache.key_GLPKZH, self.cache.value_GLPKZH))
        first = self.layer * self.cache.key_GLPKZH.shape[2]
        return Pages(key, value, first + rows.table_BW, jnp.max(positions_BT, axis=1) + 1)

    def with_pages(self, pages: Pages) -> "PagedLayer":
        """The layer with updated pages."""
        shape = self.cache.key_GLPKZH.shape
        key, value = pages.key_PKZH.reshape(shape), pages.value_PKZH.reshape(shape)
        cache = dataclasses.replace(self.cache, key_GLPKZH=key, value_GLPKZH=value)
        return PagedLayer(cache, self.layer, pages.length_B)

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether values of this dtype are stored without loss."""
        return self.cache.key_GLPKZH.dtype == dtype

    def read(self, rows: PageTable | None, dtype: np.dtype) -> KeysValues:
        """The rows' pages one after the other.

        What other sequences left behind in a page is hidden by its position, and zeroed among the values: a number that
        is not finite would get through a weight of zero.
        """
        assert rows is not None and self.length_B is not None
        key_BKSH = self._gather(self.cache.key_GLPKZH, self.cache.key_scale_GLPKZ, rows, dtype)
        value_BKSH = self._gather(self.cache.value_GLPKZH, self.cache.value_scale_GLPKZ, rows, dtype)
        slots_1S = jnp.arange(key_BKSH.shape[2], dtype=jnp.int32)[None]
        is_written_BS = slots_1S < self.length_B[:, None]
        value_BKSH = jnp.where(is_written_BS[:, None, :, None], value_BKSH, 0)
        positions_BS = jnp.where(is_written_BS, slots_1S, -1)
        return KeysValues(key_BKSH.swapaxes(1, 2), value_BKSH.swapaxes(1, 2), positions_BS)

    def _gather(
        self, all_GLPKZH: jax.Array, scale_GLPKZ: jax.Array | None, rows: PageTable, dtype: np.dtype
    ) -> jax.Array:
        def gather(all_LP: jax.Array, table_BW: jax.Array) -> jax.Array:
            return all_LP[self.layer, table_BW]

        gathered_BWKZH = join_groups(map_groups(gather, all_GLPKZH, rows.table_BW)).astype(dtype)
        if scale_GLPKZ is not None:
            scale_BWKZ = join_groups(map_groups(gather, scale_GLPKZ, rows.table_BW))
            gathered_BWKZH = gathered_BWKZH * scale_BWKZ[..., None].astype(dtype)
        B, W, K, Z, H = gathered_BWKZH.shape
        return gathered_BWKZH.swapaxes(1, 2).reshape(B, K, W * Z, H)


def _quantize(x: jax.Array, storage: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Values [..., H] in the storage dtype, and their scale [...]; None if the dtype needs none."""
    if storage not in SCALED:
        return x.astype(storage), None
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / SCALED[storage]
    scaled = x / jnp.where(scale == 0, 1, scale)[..., None]
    return (jnp.round(scaled) if storage == jnp.int8 else scaled).astype(storage), scale
