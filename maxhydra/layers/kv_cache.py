"""Caches of earlier tokens: keys and values, dense or paged, and recurrent states.

A cache is any pytree of arrays with the methods of `Cache`, stacked over the layers of one pattern position. The mixer
creates it (`empty_cache`), reads its own layer as `ctx.cache` and returns the updated layer. The decoder only passes it
on, and the engine only allocates, shards and donates it, so a new kind of cache is a class here and no change there.

Paged caches are divided into groups, one per shard of the batch: a row of a call uses only pages and slots of its
group, which are on the devices that compute the row. Rows come in equal blocks, group by group.

L layers, B rows of a batch, T tokens of a row, S slots, G groups, P pages of a group, W pages of a row, Z tokens of a
page, N slots of a group, K key and value heads, H head size.
"""

import dataclasses
from collections.abc import Callable, Mapping
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
    """Pages of each row in token order, numbered within its group; entries after its last page are arbitrary. Later
    tokens are not visible."""
    slots_B: jax.Array
    """Slot of each row among the sequences that are decoded together, for caches of fixed size per sequence. Numbered
    over all groups."""


class SequenceIndex(NamedTuple):
    """Pages and slot of one sequence in the caches of an engine."""

    group: jax.Array
    pages_W: jax.Array
    """Out-of-range entries are padding."""
    slot: jax.Array
    """Numbered over all groups."""


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

    def every(self, tokens: int) -> "CacheSpec":
        """The capacity for one key and value per this many tokens."""
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

    def every(self, tokens: int) -> "DenseCacheSpec":
        return dataclasses.replace(self, length=-(-self.length // tokens))

    def states(self, layers: int, arrays: Mapping[str, StateSpec]) -> "StateCache":
        return StateCache(
            {name: jnp.zeros((layers, self.batch, *spec.shape), spec.dtype) for name, spec in arrays.items()},
            tuple((name, ("layers", "act_batch", *spec.axes)) for name, spec in arrays.items()),
        )


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

    def take(self, index: SequenceIndex) -> "NoCache":
        return self

    def put(self, taken: "NoCache", index: SequenceIndex) -> "NoCache":
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class JointCache:
    """Several caches of the same layers by name. Also the view of one layer."""

    parts: dict[str, Any]

    def at(self, layer: jax.Array | int) -> "JointCache":
        return JointCache({name: part.at(layer) for name, part in self.parts.items()})

    def with_layer(self, view: "JointCache") -> "JointCache":
        return JointCache({name: part.with_layer(view.parts[name]) for name, part in self.parts.items()})

    def axes(self) -> "JointCache":
        return JointCache({name: part.axes() for name, part in self.parts.items()})

    def take(self, index: SequenceIndex) -> "JointCache":
        """The caches of one sequence."""
        return JointCache({name: part.take(index) for name, part in self.parts.items()})

    def put(self, taken: "JointCache", index: SequenceIndex) -> "JointCache":
        """The caches with those of one sequence replaced."""
        return JointCache({name: part.put(taken.parts[name], index) for name, part in self.parts.items()})


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
        token_axes: Any = ("layers", "act_batch", None, heads_axis(self.key_LBSKH.shape[3]), None)
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


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["names"])
@dataclasses.dataclass(frozen=True)
class StateCache:
    """Arrays of fixed size per sequence, for recurrent mixers: [G, L, N, ...], or [L, B, ...] without slots."""

    arrays: dict[str, Any]
    names: tuple[tuple[str, LogicalAxes], ...]
    """Logical axes of each array."""

    def at(self, layer: jax.Array | int) -> "StateLayer":
        return StateLayer(self, jnp.asarray(layer))

    def with_layer(self, view: "StateLayer") -> "StateCache":
        return view.cache

    def axes(self) -> "StateCache":
        return StateCache(dict(self.names), self.names)

    def take(self, index: SequenceIndex) -> "StateCache":
        """The states [L, 1, ...] of one sequence."""
        taken = {name: take_rows(array, index.group, _slot(array, index)) for name, array in self.arrays.items()}
        return StateCache(taken, self.names)

    def put(self, taken: "StateCache", index: SequenceIndex) -> "StateCache":
        """The cache with the states of one sequence replaced."""
        new = taken.arrays
        arrays = {
            name: put_rows(array, new[name], index.group, _slot(array, index)) for name, array in self.arrays.items()
        }
        return StateCache(arrays, self.names)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StateLayer:
    """One layer of a state cache: the whole cache and the layer's index."""

    cache: StateCache
    layer: jax.Array

    def read(self, rows: PageTable | None) -> dict[str, jax.Array]:
        """The states of the call's rows; a padding row reads another row's state, which it must not use."""
        if rows is None:
            return {name: array[self.layer] for name, array in self.cache.arrays.items()}

        def read(arrays: dict[str, jax.Array], slots_B: jax.Array) -> dict[str, jax.Array]:
            return {name: array.at[self.layer, slots_B].get(mode="clip") for name, array in arrays.items()}

        return jax.tree.map(join_groups, map_groups(read, self.cache.arrays, self._slots_in_group(rows)))

    def write(self, arrays: Mapping[str, jax.Array], rows: PageTable | None) -> "StateLayer":
        old = self.cache.arrays
        new = {name: arrays[name].astype(old[name].dtype) for name in old}

        def write(old: dict[str, jax.Array], new: dict[str, jax.Array], *slots_B: jax.Array) -> dict[str, jax.Array]:
            return {name: old[name].at[(self.layer, *slots_B)].set(new[name], mode="drop") for name in old}

        stored = write(old, new) if rows is None else map_groups(write, old, new, self._slots_in_group(rows))
        return StateLayer(StateCache(stored, self.cache.names), self.layer)

    def _slots_in_group(self, rows: PageTable) -> jax.Array:
        """Slots of the rows, numbered within their group; those of padding rows are out of range."""
        G, _, N, *_ = next(iter(self.cache.arrays.values())).shape
        return rows.slots_B - N * jnp.repeat(jnp.arange(G), rows.slots_B.shape[0] // G)


def map_groups(function: Callable[..., Any], stored: Any, *rows: Any) -> Any:
    """[G, ...] function(stored, *rows) of each group: arrays [G, ...] of a cache, and its block of arrays [B, ...].

    The compiler partitions a mapped gather or scatter along the groups, so that no page moves between devices.
    """
    G = jax.tree.leaves(stored)[0].shape[0]
    if G == 1:
        out = function(jax.tree.map(lambda x: jnp.squeeze(x, 0), stored), *rows)
        return jax.tree.map(lambda x: x[None], out)
    return jax.vmap(function)(stored, *jax.tree.map(lambda x: x.reshape(G, -1, *x.shape[1:]), rows))


def take_rows(stored: jax.Array, group: jax.Array, index_W: jax.Array) -> jax.Array:
    """[L, W, ...] rows of one group from [G, L, N, ...]; out-of-range indices give arbitrary rows."""
    return jax.vmap(lambda x: x.at[:, index_W].get(mode="clip"))(stored)[group]


def put_rows(stored: jax.Array, new: jax.Array, group: jax.Array, index_W: jax.Array) -> jax.Array:
    """[G, L, N, ...] with rows of one group replaced by [L, W, ...]; out-of-range indices are dropped."""

    def put(x: jax.Array, number: jax.Array) -> jax.Array:
        return x.at[:, jnp.where(number == group, index_W, x.shape[1])].set(new, mode="drop")

    return jax.vmap(put)(stored, jnp.arange(stored.shape[0]))


def _slot(stored: jax.Array, index: SequenceIndex) -> jax.Array:
    """[1] slot of a sequence within its group."""
    return (index.slot - index.group * stored.shape[2])[None]


def join_groups(x: jax.Array) -> jax.Array:
    """[G, B / G, ...] as [B, ...]."""
    return x.reshape(-1, *x.shape[2:])


def heads_axis(heads: int) -> str | None:
    """The logical axis of the heads; a single head, shared by all queries, is not sharded."""
    return "act_kv_heads" if heads > 1 else None
