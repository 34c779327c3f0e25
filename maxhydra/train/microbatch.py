"""Run a function over a batch one micro-batch at a time, to bound the memory of each pass."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
Batch = Mapping[str, jax.Array]


def split_microbatches(batch: Batch, parts: int) -> Any:
    """Reshape the arrays of a batch to [parts, rows, ...].

    Row b * parts + i goes to micro-batch i: each device splits its own rows, so nothing moves between devices.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)


def map_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """Apply a row-wise function in micro-batches; the result is a tree of [B, ...]."""
    if parts == 1:
        return function(batch)
    outputs = jax.lax.map(function, split_microbatches(batch, parts))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), outputs)


def sum_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """Apply a function that returns sums over rows in micro-batches, and add up the results."""
    if parts == 1:
        return function(batch)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(function, split_microbatches(batch, parts)))
