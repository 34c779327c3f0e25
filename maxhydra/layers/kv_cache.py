"""Caches of earlier tokens: keys and values, dense or paged, and recurrent states.

A cache is any pytree of arrays with the methods of `Cache`, stacked over the layers of one pattern position. The mixer
creates it (`empty_cache`), reads its own layer as `ctx.cache` and returns the updated layer. The decoder only passes it
on, and the engine only allocates, shards and donates it, so a new kind of cache is a class here and no change there.

L layers, B rows of a batch, T tokens of a row, S slots, P pages, W pages of a row, Z tokens of a page, K key and value
heads, H head size.
"""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from maxhydra.kernels.paged_attention import Pages
from maxhydra.sharding import LogicalAxes


class PageTable(NamedTuple):
    """Pages and slots that the rows of a call have in the caches of an engine."""

    table_BW: jax.Array
    """Pages of each row in token order; entries after its last page are arbitrary. Later tokens are not visible."""
    slots_B: jax.Array
    """Slot of each row among the sequences that are decoded together, for caches of fixed size per sequence."""


class Cache(Protocol):
    """The interface of caches for the decoder and the engine."""

    def at(self, layer: jax.Array | int) -> Any:
        """The view of one layer that its mixer gets."""
        ...

    def with_layer(self, view: Any) -> Self:
        """The cache with one layer's view updated by its mixer."""
        ...

    def axes(self) -> Self:
        """The cache with the logical axes of each array in its place."""
        ...


class CacheSpec(Protocol):
    """Capacity of a cache, from which every kind of mixer creates the arrays that it needs."""

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> Cache:
        """A cache of keys and values per token and head. `value_dim`: size of values if it differs from keys."""
        ...

    def states(self, layers: int, arrays: Mapping[str, "StateSpec"]) -> Cache:
        """A cache of arrays of fixed size per sequence, such as the state of a recurrence."""
        ...


class StateSpec(NamedTuple):
    """One array of a state cache, without the dimensions of layers and sequences."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: LogicalAxes


class KeysValues(NamedTuple):
    """Keys and values to attend to."""

    key_BSKH: jax.Array
    value_BSKH: jax.Array
    positions_BS: jax.Array | None
    """Position of each key, -1 for an empty slot. None: keys are the tokens of this call, one per query."""


@dataclasses.dataclass(frozen=True)
class DenseCacheSpec:
    """One slot per token of a few sequences of similar length."""

    batch: int
    length: int

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> "DenseCache":
        shape = (layers, self.batch, self.length, kv_heads)
        key, value = (jnp.zeros((*shape, size), dtype) for size in (head_dim, value_dim or head_dim))
        return DenseCache(key, value, jnp.zeros(shape[:2], jnp.int32))

    def states(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        return _states(layers, self.batch, "act_batch", arrays)


@dataclasses.dataclass(frozen=True)
class PagedCacheSpec:
    """Pages allocated to sequences on demand (Kwon et al., 2023), and one slot per sequence for states."""

    pages: int
    page_size: int
    slots: int
    storage: np.dtype | None
    """Dtype of stored keys and values; None: the compute dtype."""

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> "PagedCache":
        storage = dtype if self.storage is None else self.storage
        shape = (layers, self.pages, kv_heads, self.page_size)
        key, value = (jnp.zeros((*shape, size), storage) for size in (head_dim, value_dim or head_dim))
        scale = jnp.zeros(shape, jnp.float32) if storage in SCALED else None
        return PagedCache(key, value, scale, scale)

    def states(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        """One slot per sequence decoded at a time, in the dtypes of the arrays."""
        return _states(layers, self.slots, None, arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoCache:
    """The cache of layers without state, such as those that use the keys and values of another."""

    def at(self, layer: jax.Array | int) -> "NoCache":
        return self

    def with_layer(self, view: "NoCache") -> "NoCache":
        return self

    def axes(self) -> "NoCache":
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Keys and values of all tokens so far; the token at position p is in slot p of its row."""

    key_LBSKH: jax.Array
    value_LBSKH: jax.Array
    length_LB: jax.Array

    def at(self, layer: jax.Array | int) -> "DenseLayer":
        take = partial(jax.lax.dynamic_index_in_dim, index=layer, keepdims=False)
        return DenseLayer(take(self.key_LBSKH), take(self.value_LBSKH), take(self.length_LB), jnp.asarray(layer))

    def with_layer(self, view: "DenseLayer") -> "DenseCache":
        put = partial(jax.lax.dynamic_update_index_in_dim, index=view.layer, axis=0)
        key, value = put(self.key_LBSKH, view.key_BSKH), put(self.value_LBSKH, view.value_BSKH)
        return DenseCache(key, value, put(self.length_LB, view.length_B))

    def axes(self) -> "DenseCache":
        token_axes: Any = ("layers", "act_batch", None, _heads_axis(self.key_LBSKH.shape[3]), None)
        row_axes: Any = ("layers", "act_batch")
        return DenseCache(token_axes, token_axes, row_axes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """One layer of a dense cache."""

    key_BSKH: jax.Array
    value_BSKH: jax.Array
    length_B: jax.Array
    """Slots written in each row."""
    layer: jax.Array

    def insert(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> "DenseLayer":
        """Write tokens to the slots of their positions; negative positions (padding) are not written.

        Positions beyond the last slot are dropped: the caller sizes the cache for the longest sequence.
        """
        slots_BT = jnp.where(positions_BT < 0, self.key_BSKH.shape[1], positions_BT)
        write = jax.vmap(lambda buffer_SKH, slots_T, new_TKH: buffer_SKH.at[slots_T].set(new_TKH, mode="drop"))
        return dataclasses.replace(
            self,
            key_BSKH=write(self.key_BSKH, slots_BT, key_BTKH),
            value_BSKH=write(self.value_BSKH, slots_BT, value_BTKH),
            length_B=jnp.maximum(self.length_B, jnp.max(positions_BT, axis=1) + 1),
        )

    begin = insert
    """Rows are contiguous, so tokens that start a sequence are written like any others."""

    def pages(self, positions_BT: jax.Array, rows: PageTable | None) -> Pages | None:
        return None

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether values of this dtype are stored without loss."""
        return self.key_BSKH.dtype == dtype

    def read(self, rows: PageTable | None, dtype: np.dtype) -> KeysValues:
        slots_1S = jnp.arange(self.key_BSKH.shape[1], dtype=jnp.int32)[None]
        positions_BS = jnp.where(slots_1S < self.length_B[:, None], slots_1S, -1)
        return KeysValues(self.key_BSKH, self.value_BSKH, positions_BS)


# Storage dtypes that need a scale -> their largest value.
SCALED = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values of all sequences in one pool of pages; a call writes its tokens and reads its rows' pages.

    Only those are touched, so the cost of a step does not depend on the number of pages. Within a page the tokens of a
    head are contiguous, as attention reads them. In 8 bits every token has one scale per head.
    """

    key_LPKZH: jax.Array
    value_LPKZH: jax.Array
    key_scale_LPKZ: jax.Array | None
    value_scale_LPKZ: jax.Array | None

    def at(self, layer: jax.Array | int) -> "PagedLayer":
        return PagedLayer(self, jnp.asarray(layer), None)

    def with_layer(self, view: "PagedLayer") -> "PagedCache":
        return view.cache

    def axes(self) -> "PagedCache":
        token_axes: Any = ("layers", None, _heads_axis(self.key_LPKZH.shape[2]), None, None)
        scale_axes: Any = None if self.key_scale_LPKZ is None else token_axes[:4]
        return PagedCache(token_axes, token_axes, scale_axes, scale_axes)


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
        Z = self.cache.key_LPKZH.shape[3]
        page_BT = jnp.take_along_axis(rows.table_BW, jnp.maximum(positions_BT, 0) // Z, axis=1)
        index = (self.layer, self._mask_pages(positions_BT < 0, page_BT), slice(None), positions_BT % Z)
        return self._write(index, key_BTKH, value_BTKH, positions_BT)

    def begin(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> Self:
        """`insert` for tokens that start their rows: whole pages are written, in a fraction of the time on a GPU.

        Padding after the tokens fills their last page; it is overwritten before any query can see it.
        """
        assert rows is not None
        Z = self.cache.key_LPKZH.shape[3]
        W = min(positions_BT.shape[1] // Z, rows.table_BW.shape[1])
        if positions_BT.shape[1] % Z:
            return self.insert(key_BTKH, value_BTKH, positions_BT, rows)
        index = (self.layer, self._mask_pages(positions_BT[:, : W * Z : Z] < 0, rows.table_BW[:, :W]))
        key, value = (x.reshape(x.shape[0], -1, Z, *x.shape[2:])[:, :W].swapaxes(2, 3) for x in (key_BTKH, value_BTKH))
        return self._write(index, key, value, positions_BT)

    def _mask_pages(self, is_padding: jax.Array, pages: jax.Array) -> jax.Array:
        """Page indices, with distinct out-of-range ones for padding.

        Distinct, because a GPU scatters several values at a time if it knows that no index occurs twice.
        """
        out_of_range = self.cache.key_LPKZH.shape[1] + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
        return jnp.where(is_padding, out_of_range, pages)

    def _write(self, index: tuple[Any, ...], key: jax.Array, value: jax.Array, positions_BT: jax.Array) -> Self:
        """The layer with keys and values [..., H] written at an index; out-of-range entries are dropped."""
        key, key_scale = _quantize(key, self.cache.key_LPKZH.dtype)
        value, value_scale = _quantize(value, self.cache.value_LPKZH.dtype)
        cache = PagedCache(
            self.cache.key_LPKZH.at[index].set(key, mode="drop", unique_indices=True),
            self.cache.value_LPKZH.at[index].set(value, mode="drop", unique_indices=True),
            _set(self.cache.key_scale_LPKZ, index, key_scale),
            _set(self.cache.value_scale_LPKZ, index, value_scale),
        )
        return dataclasses.replace(self, cache=cache, length_B=jnp.max(positions_BT, axis=1) + 1)

    def pages(self, positions_BT: jax.Array, rows: PageTable | None) -> Pages | None:
        """The rows' pages in place, before this call's tokens are written; None for storage with scales."""
        assert rows is not None
        if self.cache.key_scale_LPKZ is not None:
            return None
        L, P = self.cache.key_LPKZH.shape[:2]
        key, value = (x.reshape(L * P, *x.shape[2:]) for x in (self.cache.key_LPKZH, self.cache.value_LPKZH))
        return Pages(key, value, self.layer * P + rows.table_BW, jnp.max(positions_BT, axis=1) + 1)

    def with_pages(self, pages: Pages) -> "PagedLayer":
        """The layer with updated pages."""
        shape = self.cache.key_LPKZH.shape
        key, value = pages.key_PKZH.reshape(shape), pages.value_PKZH.reshape(shape)
        cache = dataclasses.replace(self.cache, key_LPKZH=key, value_LPKZH=value)
        return PagedLayer(cache, self.layer, pages.length_B)

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether values of this dtype are stored without loss."""
        return self.cache.key_LPKZH.dtype == dtype

    def read(self, rows: PageTable | None, dtype: np.dtype) -> KeysValues:
        """The rows' pages one after the other.

        What other sequences left behind in a page is hidden by its position, and zeroed among the values: a number that
        is not finite would get through a weight of zero.
        """
        assert rows is not None and self.length_B is not None
        key_BKSH = self._gather(self.cache.key_LPKZH, self.cache.key_scale_LPKZ, rows, dtype)
        value_BKSH = self._gather(self.cache.value_LPKZH, self.cache.value_scale_LPKZ, rows, dtype)
        slots_1S = jnp.arange(key_BKSH.shape[2], dtype=jnp.int32)[None]
        is_written_BS = slots_1S < self.length_B[:, None]
        value_BKSH = jnp.where(is_written_BS[:, None, :, None], value_BKSH, 0)
        positions_BS = jnp.where(is_written_BS, slots_1S, -1)
        return KeysValues(key_BKSH.swapaxes(1, 2), value_BKSH.swapaxes(1, 2), positions_BS)

    def _gather(
        self, all_LPKZH: jax.Array, scale_LPKZ: jax.Array | None, rows: PageTable, dtype: np.dtype
    ) -> jax.Array:
        gathered_BWKZH = all_LPKZH[self.layer, rows.table_BW].astype(dtype)
        if scale_LPKZ is not None:
            gathered_BWKZH = gathered_BWKZH * scale_LPKZ[self.layer, rows.table_BW][..., None].astype(dtype)
        B, W, K, Z, H = gathered_BWKZH.shape
        return gathered_BWKZH.swapaxes(1, 2).reshape(B, K, W * Z, H)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class StateCache:
    """Arrays [L, sequences, ...] of fixed size per sequence, for recurrent mixers."""

    arrays: dict[str, Any]
    names: tuple[tuple[str, LogicalAxes], ...]
    """Logical axes of each array."""

    def at(self, layer: jax.Array | int) -> "StateLayer":
        return StateLayer(self, jnp.asarray(layer))

    def with_layer(self, view: "StateLayer") -> "StateCache":
        return view.cache

    def axes(self) -> "StateCache":
        return StateCache(dict(self.names), self.names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateLayer:
    """One layer of a state cache: the whole cache and the layer's index."""

    cache: StateCache
    layer: jax.Array

    def read(self, rows: PageTable | None) -> dict[str, jax.Array]:
        """The states of the call's rows; a padding row reads another row's state, which it must not use."""
        index = self._index(rows)
        return {name: array.at[index].get(mode="clip") for name, array in self.cache.arrays.items()}

    def write(self, arrays: Mapping[str, jax.Array], rows: PageTable | None) -> "StateLayer":
        index, old = self._index(rows), self.cache.arrays
        new = {name: old[name].at[index].set(arrays[name].astype(old[name].dtype), mode="drop") for name in old}
        return StateLayer(StateCache(new, self.cache.names), self.layer)

    def _index(self, rows: PageTable | None) -> tuple[jax.Array, ...]:
        return (self.layer,) if rows is None else (self.layer, rows.slots_B)


def _states(layers: int, count: int, axis: str | None, arrays: Mapping[str, StateSpec]) -> StateCache:
    return StateCache(
        {name: jnp.zeros((layers, count, *spec.shape), spec.dtype) for name, spec in arrays.items()},
        tuple((name, ("layers", axis, *spec.axes)) for name, spec in arrays.items()),
    )


def _heads_axis(heads: int) -> str | None:
    """The logical axis of the heads; a single head, shared by all queries, is not sharded."""
    return "act_kv_heads" if heads > 1 else None


def _quantize(x: jax.Array, storage: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Values [..., H] in the storage dtype, and their scale [...]; None if the dtype needs none."""
    if storage not in SCALED:
        return x.astype(storage), None
    x = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(x), axis=-1) / SCALED[storage]
    scaled = x / jnp.where(scale == 0, 1, scale)[..., None]
    return (jnp.round(scaled) if storage == jnp.int8 else scaled).astype(storage), scale


def _set(scales: jax.Array | None, index: tuple[Any, ...], new: jax.Array | None) -> jax.Array | None:
    return None if scales is None else scales.at[index].set(new, mode="drop", unique_indices=True)
