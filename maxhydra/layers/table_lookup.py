"""Rows of an embedding table that is split over devices, by vocabulary and by features.

Tokens of all devices that hold features of the same rows are gathered; each takes its part of the rows, and an
all-to-all brings the parts of a token's row together. Rows travel in the compute dtype, and their gradient too; it is
summed into the table in the table's dtype. The partitioner would exchange rows in the table's dtype, or replicate them.

B batch, T tokens, V vocabulary, D features, N devices among which the features are split.
"""

import dataclasses
import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from maxhydra.kernels.placement import Placement
from maxhydra.kernels.sharded_vjp import axes_of
from maxhydra.layers.context import Context
from maxhydra.sharding import LogicalAxes


def look_up(
    table_VD: jax.Array,
    tokens_BT: jax.Array,
    ctx: Context,
    *,
    dtype: np.dtype,
    axes: LogicalAxes = ("vocab", "embed"),
) -> jax.Array:
    """[B, T, D] rows of the tokens in `dtype`; an id outside the vocabulary gives NaN. `axes`: those of the table."""
    B, T = tokens_BT.shape
    spec = ctx.sharder.spec(axes)
    place = ctx.place.dividing(batch=B, length=T, stream_length=T)
    lookup = _ShardedLookup.of(jax.ShapeDtypeStruct(table_VD.shape, table_VD.dtype), spec, place, dtype)
    if lookup is None:
        return jnp.take(table_VD, tokens_BT, axis=0, mode="fill", fill_value=jnp.nan).astype(dtype)
    return _take(lookup, table_VD, tokens_BT)


@dataclasses.dataclass(frozen=True)
class _ShardedLookup:
    """The static arguments of a call; axes are read outside the shard_map, where they are free."""

    place: Placement
    shape: tuple[int, int]
    """Rows and features of the table on each device."""
    table_dtype: np.dtype
    table: PartitionSpec
    tokens: PartitionSpec
    rows: PartitionSpec
    vocab: tuple[str, ...]
    features: tuple[str, ...]
    replicas: tuple[str, ...]
    """Axes that split tokens but not the table."""
    is_scattered: bool
    """Whether the sum over the vocabulary splits the length of the rows."""
    dtype: np.dtype

    @classmethod
    def of(
        cls, table: jax.ShapeDtypeStruct, spec: PartitionSpec, place: Placement, dtype: np.dtype
    ) -> "_ShardedLookup | None":
        """None on one device, and if the features are split over axes that do not split tokens."""
        mesh = place.mesh
        if mesh is None or not place.free_axes:
            return None
        vocab, features = (tuple(axis for axis in axes_of(entry) if axis in place.free_axes) for entry in spec)
        length, stream = (axes_of(place.spec(name)[0]) for name in ("length", "stream_length"))
        split = (*axes_of(place.spec("batch")[0]), *length)
        if not set(features) <= set(split) or set(vocab) & set(split):
            return None
        is_scattered = bool(vocab) and stream == (*length, *vocab)
        shards = [math.prod(mesh.shape[axis] for axis in axes) for axes in (vocab, features)]
        return cls(
            place=place,
            shape=(table.shape[0] // shards[0], table.shape[1] // shards[1]),
            table_dtype=table.dtype,
            table=PartitionSpec(vocab or None, features or None),
            tokens=place.spec("batch", "length"),
            rows=place.spec("batch", "stream_length" if is_scattered else "length", None),
            vocab=vocab,
            features=features,
            replicas=tuple(axis for axis in split if axis not in features),
            is_scattered=is_scattered,
            dtype=dtype,
        )

    def all_tokens(self, tokens_BT: jax.Array) -> jax.Array:
        """[N, B, T] tokens whose rows this device holds features of."""
        return jax.lax.all_gather(tokens_BT, self.features) if self.features else tokens_BT[None]

    def local_ids(self, tokens: jax.Array, rows: int) -> jax.Array:
        """Ids in this device's part of the vocabulary; `rows` for all others."""
        start = jax.lax.axis_index(self.vocab) * rows if self.vocab else 0
        return jnp.where((tokens >= start) & (tokens < start + rows), tokens - start, rows)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _take(lookup: _ShardedLookup, table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    def on_device(table_VD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        ids_NBT = lookup.local_ids(lookup.all_tokens(tokens_BT), len(table_VD))
        rows_NBTD = jnp.take(table_VD, ids_NBT, axis=0, mode="fill", fill_value=0).astype(lookup.dtype)
        if lookup.is_scattered:
            rows_NBTD = jax.lax.psum_scatter(rows_NBTD, lookup.vocab, scatter_dimension=2, tiled=True)
        elif lookup.vocab:
            rows_NBTD = jax.lax.psum(rows_NBTD, lookup.vocab)
        if lookup.features:
            rows_NBTD = jax.lax.all_to_all(rows_NBTD, lookup.features, split_axis=0, concat_axis=3, tiled=True)
        return rows_NBTD[0]

    run = lookup.place.manual(on_device, (lookup.table, lookup.tokens), lookup.rows)
    is_known_BT1 = ((tokens_BT >= 0) & (tokens_BT < len(table_VD)))[:, :, None]
    return jnp.where(is_known_BT1, run(table_VD, tokens_BT), jnp.nan)


def _forward(lookup: _ShardedLookup, table_VD: jax.Array, tokens_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(lookup, table_VD, tokens_BT), tokens_BT


def _backward(
    lookup: _ShardedLookup, tokens_BT: jax.Array, d_rows_BTD: jax.Array
) -> tuple[jax.Array, np.ndarray[Any, Any]]:
    def on_device(d_rows_BTD: jax.Array, tokens_BT: jax.Array) -> jax.Array:
        d_rows_NBTD = d_rows_BTD[None]
        if lookup.features:
            d_rows_NBTD = jax.lax.all_to_all(d_rows_NBTD, lookup.features, split_axis=3, concat_axis=0, tiled=True)
        if lookup.is_scattered:
            d_rows_NBTD = jax.lax.all_gather(d_rows_NBTD, lookup.vocab, axis=2, tiled=True)
        ids_NBT = lookup.local_ids(lookup.all_tokens(tokens_BT), lookup.shape[0])
        zeros_VD = jnp.zeros(lookup.shape, lookup.table_dtype)
        d_table_VD = zeros_VD.at[ids_NBT].add(d_rows_NBTD.astype(lookup.table_dtype), mode="drop")
        return jax.lax.psum(d_table_VD, lookup.replicas) if lookup.replicas else d_table_VD

    run = lookup.place.manual(on_device, (lookup.rows, lookup.tokens), lookup.table)
    return run(d_rows_BTD, tokens_BT), np.zeros(tokens_BT.shape, jax.dtypes.float0)


_take.defvjp(_forward, _backward)
