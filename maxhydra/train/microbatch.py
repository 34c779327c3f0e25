"""A batch in parts, one after another: as many as a step has micro-batches, so that no pass takes more memory."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

T = TypeVar("T")
Batch = Mapping[str, jax.Array]


def split_microbatches(batch: Batch, parts: int) -> Any:
    """Its arrays as [parts, rows, ...].

    Row b * parts + i goes to part i: each device cuts its own rows, nothing moves between devices.
    """
    return jax.tree.map(lambda x: jnp.swapaxes(x.reshape(-1, parts, *x.shape[1:]), 0, 1), batch)


def map_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """A function that treats every row alone, its results a tree of [B, ...]."""
    if parts == 1:
        return function(batch)
    found = jax.lax.map(function, split_microbatches(batch, parts))
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(-1, *x.shape[2:]), found)


def sum_microbatches(function: Callable[[Any], T], batch: Batch, parts: int) -> T:
    """A function whose results are sums over the rows."""
    if parts == 1:
        return function(batch)
    return jax.tree.map(lambda x: jnp.sum(x, axis=0), jax.lax.map(function, split_microbatches(batch, parts)))
