"""What a layer keeps of earlier tokens.

A cache is any pytree of arrays with the methods of `Cache`; it holds the layers of one place of the pattern on a
leading axis. The mixer that needs it makes it (`empty_cache`), finds its own layer in `ctx.cache` and returns the
successor of that; the decoder only hands on, and the engine only allocates, shards and donates, so that a latent,
recurrent or ring cache is a new class here and no change there.

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
    """Where the rows of a call lie in caches that outlive the call."""

    table_BW: jax.Array
    """Pages of each row, in the order of its tokens; the rest is any page. Tokens beyond them are not seen."""
    slots_B: jax.Array
    """Place of each row among those that are decoded at a time, for caches of a fixed size per sequence."""


class Cache(Protocol):
    """What the decoder and the engine ask of a cache."""

    def at(self, layer: jax.Array | int) -> Any:
        """The layer of this index as its mixer sees it."""
        ...

    def merged(self, view: Any) -> Self:
        """The whole with what the mixer made of a layer."""
        ...

    def axes(self) -> Self:
        """Logical axes in place of each array."""
        ...


class CacheSpec(Protocol):
    """What there is to be kept, before any mixer says what of: every kind of cache is made from it."""

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> Cache:
        """A key and a value of each token and head. `value_dim`: the size of values where keys have another."""
        ...

    def kept(self, layers: int, arrays: Mapping[str, "StateSpec"]) -> Cache:
        """Arrays of a fixed size per sequence, such as the state of a recurrence."""
        ...


class StateSpec(NamedTuple):
    """An array that a layer keeps of a sequence, without the dimensions of layers and sequences."""

    shape: tuple[int, ...]
    dtype: DTypeLike
    axes: LogicalAxes


class KeysValues(NamedTuple):
    """Tokens that queries can look at."""

    key_BSKH: jax.Array
    value_BSKH: jax.Array
    positions_BS: jax.Array | None
    """-1 where there is none. None: they are the tokens at hand, one for each query."""


@dataclasses.dataclass(frozen=True)
class DenseCacheSpec:
    """A place for every token of a few sequences of about the same length."""

    batch: int
    length: int

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> "DenseCache":
        shape = (layers, self.batch, self.length, kv_heads)
        key, value = (jnp.zeros((*shape, size), dtype) for size in (head_dim, value_dim or head_dim))
        return DenseCache(key, value, jnp.zeros(shape[:2], jnp.int32))

    def kept(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        return _states(layers, self.batch, "act_batch", arrays)


@dataclasses.dataclass(frozen=True)
class PagedCacheSpec:
    """Pages that sequences take as they need them (Kwon et al., 2023), and slots for what has a fixed size."""

    pages: int
    page_size: int
    slots: int
    storage: np.dtype | None
    """Number format of what is kept; None: that of the computation."""

    def keys_and_values(
        self, *, layers: int, kv_heads: int, head_dim: int, dtype: np.dtype, value_dim: int | None = None
    ) -> "PagedCache":
        storage = dtype if self.storage is None else self.storage
        shape = (layers, self.pages, kv_heads, self.page_size)
        key, value = (jnp.zeros((*shape, size), storage) for size in (head_dim, value_dim or head_dim))
        scale = jnp.zeros(shape, jnp.float32) if storage in SCALED else None
        return PagedCache(key, value, scale, scale)

    def kept(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        """One place for each sequence that is decoded at a time, in the arrays' own formats."""
        return _states(layers, self.slots, None, arrays)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NoCache:
    """Of layers that keep nothing of their own."""

    def at(self, layer: jax.Array | int) -> "NoCache":
        return self

    def merged(self, view: "NoCache") -> "NoCache":
        return self

    def axes(self) -> "NoCache":
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseCache:
    """Keys and values of every token so far; the token at position p lies in slot p of its row."""

    key_LBSKH: jax.Array
    value_LBSKH: jax.Array
    length_LB: jax.Array

    def at(self, layer: jax.Array | int) -> "DenseLayer":
        take = partial(jax.lax.dynamic_index_in_dim, index=layer, keepdims=False)
        return DenseLayer(take(self.key_LBSKH), take(self.value_LBSKH), take(self.length_LB), jnp.asarray(layer))

    def merged(self, view: "DenseLayer") -> "DenseCache":
        put = partial(jax.lax.dynamic_update_index_in_dim, index=view.layer, axis=0)
        return DenseCache(
            put(self.key_LBSKH, view.key_BSKH),
            put(self.value_LBSKH, view.value_BSKH),
            put(self.length_LB, view.length_B),
        )

    def axes(self) -> "DenseCache":
        of_tokens: Any = ("layers", "act_batch", None, _heads_axis(self.key_LBSKH.shape[3]), None)
        of_rows: Any = ("layers", "act_batch")
        return DenseCache(of_tokens, of_tokens, of_rows)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """A layer of a dense cache."""

    key_BSKH: jax.Array
    value_BSKH: jax.Array
    length_B: jax.Array
    """Slots written in each row."""
    layer: jax.Array

    def insert(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> "DenseLayer":
        """Write tokens into the slots of their positions; those with a negative position (padding) are left out.

        Nothing is written beyond the last slot: the caller sizes the cache for the longest sequence.
        """
        slots_BT = jnp.where(positions_BT < 0, self.key_BSKH.shape[1], positions_BT)
        return dataclasses.replace(
            self,
            key_BSKH=_write(self.key_BSKH, slots_BT, key_BTKH),
            value_BSKH=_write(self.value_BSKH, slots_BT, value_BTKH),
            length_B=jnp.maximum(self.length_B, jnp.max(positions_BT, axis=1) + 1),
        )

    begin = insert
    """Rows lie in one piece: those that begin are written as all others are."""

    def pages(self, positions_BT: jax.Array, rows: PageTable | None) -> Pages | None:
        return None

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether numbers of this format come back as they were."""
        return self.key_BSKH.dtype == dtype

    def read(self, rows: PageTable | None, dtype: np.dtype) -> KeysValues:
        slots_1S = jnp.arange(self.key_BSKH.shape[1], dtype=jnp.int32)[None]
        positions_BS = jnp.where(slots_1S < self.length_B[:, None], slots_1S, -1)
        return KeysValues(self.key_BSKH, self.value_BSKH, positions_BS)


# Formats that need a scale, and their largest number.
SCALED = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.float8_e4m3fn): 448.0}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedCache:
    """Keys and values in pages of all sequences together; a call writes its tokens and reads its own rows' pages.

    Nothing but those is touched, so that a step costs the same however many pages there are. Within a page the tokens
    of a head lie together, as attention reads them. In 8 bits every token has a scale per head.
    """

    key_LPKZH: jax.Array
    value_LPKZH: jax.Array
    key_scale_LPKZ: jax.Array | None
    value_scale_LPKZ: jax.Array | None

    def at(self, layer: jax.Array | int) -> "PagedLayer":
        return PagedLayer(self, jnp.asarray(layer), None)

    def merged(self, view: "PagedLayer") -> "PagedCache":
        return view.cache

    def axes(self) -> "PagedCache":
        of_tokens: Any = ("layers", None, _heads_axis(self.key_LPKZH.shape[2]), None, None)
        of_scales: Any = None if self.key_scale_LPKZ is None else of_tokens[:4]
        return PagedCache(of_tokens, of_tokens, of_scales, of_scales)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PagedLayer:
    """A layer of a paged cache: the whole, and which part of it is meant."""

    cache: PagedCache
    layer: jax.Array
    length_B: jax.Array | None
    """Tokens of each row, once this call's are written."""

    def insert(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> Self:
        """Write tokens into the pages of their rows; those with a negative position (padding) are left out."""
        assert rows is not None
        Z = self.cache.key_LPKZH.shape[3]
        page_BT = jnp.take_along_axis(rows.table_BW, jnp.maximum(positions_BT, 0) // Z, axis=1)
        place = (self.layer, self._but_for(positions_BT < 0, page_BT), slice(None), positions_BT % Z)
        return self._written(place, key_BTKH, value_BTKH, positions_BT)

    def begin(
        self, key_BTKH: jax.Array, value_BTKH: jax.Array, positions_BT: jax.Array, rows: PageTable | None
    ) -> Self:
        """`insert` of tokens that begin their rows: page by page, which takes a GPU a fraction of the time. Padding
        behind the tokens fills their last page, where nobody sees it before it is written again."""
        assert rows is not None
        Z = self.cache.key_LPKZH.shape[3]
        W = min(positions_BT.shape[1] // Z, rows.table_BW.shape[1])
        if positions_BT.shape[1] % Z:
            return self.insert(key_BTKH, value_BTKH, positions_BT, rows)
        place = (self.layer, self._but_for(positions_BT[:, : W * Z : Z] < 0, rows.table_BW[:, :W]))
        key, value = (x.reshape(x.shape[0], -1, Z, *x.shape[2:])[:, :W].swapaxes(2, 3) for x in (key_BTKH, value_BTKH))
        return self._written(place, key, value, positions_BT)

    def _but_for(self, is_none: jax.Array, pages: jax.Array) -> jax.Array:
        """Pages, each written once; where there is none, one that does not exist, each another: a GPU writes several
        numbers at a time where it is told that no place comes twice."""
        beyond = self.cache.key_LPKZH.shape[1] + jnp.arange(pages.size, dtype=pages.dtype).reshape(pages.shape)
        return jnp.where(is_none, beyond, pages)

    def _written(self, place: tuple[Any, ...], key: jax.Array, value: jax.Array, positions_BT: jax.Array) -> Self:
        """With [..., H] at these places, where they exist."""
        key, key_scale = _stored(key, self.cache.key_LPKZH.dtype)
        value, value_scale = _stored(value, self.cache.value_LPKZH.dtype)
        cache = PagedCache(
            self.cache.key_LPKZH.at[place].set(key, mode="drop", unique_indices=True),
            self.cache.value_LPKZH.at[place].set(value, mode="drop", unique_indices=True),
            _set(self.cache.key_scale_LPKZ, place, key_scale),
            _set(self.cache.value_scale_LPKZ, place, value_scale),
        )
        return dataclasses.replace(self, cache=cache, length_B=jnp.max(positions_BT, axis=1) + 1)

    def pages(self, positions_BT: jax.Array, rows: PageTable | None) -> Pages | None:
        """The rows' pages where they lie, before this call's tokens are written; None where numbers are scaled."""
        assert rows is not None
        if self.cache.key_scale_LPKZ is not None:
            return None
        L, P = self.cache.key_LPKZH.shape[:2]
        key, value = (x.reshape(L * P, *x.shape[2:]) for x in (self.cache.key_LPKZH, self.cache.value_LPKZH))
        return Pages(key, value, self.layer * P + rows.table_BW, jnp.max(positions_BT, axis=1) + 1)

    def with_pages(self, pages: Pages) -> "PagedLayer":
        """The layer with what was written to `pages`."""
        shape = self.cache.key_LPKZH.shape
        key, value = pages.key_PKZH.reshape(shape), pages.value_PKZH.reshape(shape)
        cache = dataclasses.replace(self.cache, key_LPKZH=key, value_LPKZH=value)
        return PagedLayer(cache, self.layer, pages.length_B)

    def is_exact(self, dtype: np.dtype) -> bool:
        """Whether numbers of this format come back as they were."""
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
        found_BWKZH = all_LPKZH[self.layer, rows.table_BW].astype(dtype)
        if scale_LPKZ is not None:
            found_BWKZH = found_BWKZH * scale_LPKZ[self.layer, rows.table_BW][..., None].astype(dtype)
        B, W, K, Z, H = found_BWKZH.shape
        return found_BWKZH.swapaxes(1, 2).reshape(B, K, W * Z, H)


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class StateCache:
    """Arrays [L, sequences, ...] that do not grow with a sequence, for mixers that forget."""

    arrays: dict[str, Any]
    names: tuple[tuple[str, LogicalAxes], ...]
    """Logical axes of each array."""

    def at(self, layer: jax.Array | int) -> "StateLayer":
        return StateLayer(self, jnp.asarray(layer))

    def merged(self, view: "StateLayer") -> "StateCache":
        return view.cache

    def axes(self) -> "StateCache":
        return StateCache(dict(self.names), self.names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateLayer:
    """A layer of such a cache: the whole, and which part of it is meant."""

    cache: StateCache
    layer: jax.Array

    def read(self, rows: PageTable | None) -> dict[str, jax.Array]:
        """What the rows of the call left; a row without a sequence finds that of another, which it must not use."""
        place = self._place(rows)
        return {name: array.at[place].get(mode="clip") for name, array in self.cache.arrays.items()}

    def written(self, arrays: Mapping[str, jax.Array], rows: PageTable | None) -> "StateLayer":
        place = self._place(rows)
        old = self.cache.arrays
        new = {name: old[name].at[place].set(arrays[name].astype(old[name].dtype), mode="drop") for name in old}
        return StateLayer(StateCache(new, self.cache.names), self.layer)

    def _place(self, rows: PageTable | None) -> tuple[jax.Array, ...]:
        return (self.layer,) if rows is None else (self.layer, rows.slots_B)


def _states(layers: int, count: int, axis: str | None, arrays: Mapping[str, StateSpec]) -> StateCache:
    return StateCache(
        {name: jnp.zeros((layers, count, *kept.shape), kept.dtype) for name, kept in arrays.items()},
        tuple((name, ("layers", axis, *kept.axes)) for name, kept in arrays.items()),
    )


def _heads_axis(heads: int) -> str | None:
    """One head that all queries share is not split."""
    return "act_kv_heads" if heads > 1 else None


def _stored(x: jax.Array, storage: np.dtype) -> tuple[jax.Array, jax.Array | None]:
    """Numbers [..., H] as they are kept, and the scale [...] that makes them what they were."""
    if storage not in SCALED:
        return x.astype(storage), None
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / SCALED[storage]
    scaled = wide / jnp.where(scale == 0, 1, scale)[..., None]
    return (jnp.round(scaled) if storage == jnp.int8 else scaled).astype(storage), scale


def _set(scales: jax.Array | None, place: tuple[Any, ...], new: jax.Array | None) -> jax.Array | None:
    return None if scales is None else scales.at[place].set(new, mode="drop", unique_indices=True)


@jax.vmap
def _write(buffer_SKH: jax.Array, slots_T: jax.Array, new_TKH: jax.Array) -> jax.Array:
    return buffer_SKH.at[slots_T].set(new_TKH, mode="drop")
