"""Functions of whole matrices, such as decompositions, on a mesh: each matrix is computed on one device.

Matrices are stacked and sharded: [*stack, n, n] with mesh axes along any dimension. Each device has a block of every
matrix of its part of the stack. An all-to-all gives it whole matrices of a few of them, and another one returns the
results to the original sharding.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from maxhydra.kernels.placement import Placement
from maxhydra.kernels.sharded_vjp import axes_of

MatrixRule = Callable[..., jax.Array]


class Exchange(NamedTuple):
    """Mesh axes between which stacks of matrices of one size are exchanged."""

    size: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    copies: tuple[str, ...]
    """Axes whose devices have the same blocks; each of them computes a part of the matrices."""


def map_matrices(
    rule: MatrixRule, operands: Sequence[tuple[jax.Array, ...]], specs: Sequence[PartitionSpec], place: Placement
) -> list[jax.Array]:
    """Apply a rule to the matrices of several stacks; it maps arrays [n, n] to one of the same shape.

    All operands of a stack have the same shape and the sharding that `specs` names, as has the result.
    """
    if not place.free_axes:
        return [_map_stack(rule, arrays).reshape(arrays[0].shape) for arrays in operands]
    groups: dict[Exchange, list[int]] = defaultdict(list)
    for index, (arrays, spec) in enumerate(zip(operands, specs, strict=True)):
        groups[_exchange(arrays[0].shape[-1], spec, place)].append(index)

    def on_device(operands: list[tuple[jax.Array, ...]]) -> list[jax.Array]:
        results: dict[int, jax.Array] = {}
        for exchange, members in groups.items():
            found = _compute(rule, [operands[index] for index in members], exchange, place)
            results.update(zip(members, found, strict=True))
        return [results[index] for index in range(len(operands))]

    return place.manual(on_device, (list(specs),), list(specs))([tuple(arrays) for arrays in operands])


def _exchange(size: int, spec: PartitionSpec, place: Placement) -> Exchange:
    assert place.mesh is not None
    used = {axis for entry in spec for axis in axes_of(entry)}
    copies = tuple(axis for axis in place.free_axes if place.mesh.shape[axis] > 1 and axis not in used)
    return Exchange(size, axes_of(spec[-2]), axes_of(spec[-1]), copies)


def _compute(
    rule: MatrixRule, members: Sequence[tuple[jax.Array, ...]], exchange: Exchange, place: Placement
) -> list[jax.Array]:
    """Results of one device for stacks that share an exchange; runs under shard_map."""
    shapes = [arrays[0].shape for arrays in members]
    lengths = [math.prod(shape[:-2]) for shape in shapes]
    stacks = [jnp.concatenate(list(map(_flat, field))) for field in zip(*members, strict=True)]
    results = _return_blocks(_map_stack(rule, [_whole_matrices(x, exchange, place) for x in stacks]), exchange)
    starts = [sum(lengths[:index]) for index in range(len(lengths))]
    parts = (results[start : start + length] for start, length in zip(starts, lengths, strict=True))
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _flat(x: jax.Array) -> jax.Array:
    """[n, rows, columns]."""
    return x.reshape(-1, *x.shape[-2:])


def _map_stack(rule: MatrixRule, arrays: Sequence[jax.Array]) -> jax.Array:
    """Apply a rule to one matrix after the other.

    LAPACK calls of jaxlib with several matrices wait for threads of the pool in which they run themselves: one on each
    of several CPU devices is a deadlock.
    """
    return lax.map(lambda matrices: rule(*matrices), tuple(map(_flat, arrays)))


def _whole_matrices(blocks: jax.Array, exchange: Exchange, place: Placement) -> jax.Array:
    """The matrices that this device computes, from the blocks that it has; zeros fill up an incomplete share."""
    num_copies, num_rows, num_columns = (_num_devices(axes, place) for axes in (exchange.copies, *exchange[1:3]))
    blocks = jnp.pad(blocks, ((0, -len(blocks) % (num_copies * num_rows * num_columns)), (0, 0), (0, 0)))
    if exchange.copies:
        count = len(blocks) // num_copies
        blocks = lax.dynamic_slice_in_dim(blocks, lax.axis_index(exchange.copies) * count, count)
    for dimension, axes in ((1, exchange.rows), (2, exchange.columns)):
        if axes:
            blocks = lax.all_to_all(blocks, axes, split_axis=0, concat_axis=dimension, tiled=True)
    return blocks


def _return_blocks(matrices: jax.Array, exchange: Exchange) -> jax.Array:
    """The inverse of `_whole_matrices`, with the filling at the end."""
    for dimension, axes in ((2, exchange.columns), (1, exchange.rows)):
        if axes:
            matrices = lax.all_to_all(matrices, axes, split_axis=dimension, concat_axis=0, tiled=True)
    return lax.all_gather(matrices, exchange.copies, tiled=True) if exchange.copies else matrices


def _num_devices(axes: Any, place: Placement) -> int:
    assert place.mesh is not None
    return math.prod(place.mesh.shape[axis] for axis in axes)
