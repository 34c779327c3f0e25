"""A batch as global arrays: each process reads the rows that its own devices hold, and no others."""

import dataclasses
from collections.abc import Callable
from functools import cached_property
from typing import Any

import jax
import numpy as np

from maxhydra.data.rows import Row

# Global arrays [batch, seq_len], by the names of a row.
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What every batch looks like."""

    batch: int
    """Sequences in a global batch."""
    seq_len: int
    vocab_size: int
    """Of the model; a source must stay within it."""
    seed: int
    sharding: jax.sharding.Sharding
    """How [batch, seq_len] lies on the devices of all processes."""

    @cached_property
    def own_rows(self) -> np.ndarray:
        """Rows of the batch of which this process's devices hold any part, in order."""
        places = self.sharding.addressable_devices_indices_map((self.batch, self.seq_len))
        held = [np.arange(self.batch)[index[0]] for index in places.values() if index is not None]
        return np.unique(np.concatenate(held))


def make_batch(read: Callable[[int], Row], spec: BatchSpec) -> Batch:
    """The batch whose row i is read(i)."""
    rows = [read(int(i)) for i in spec.own_rows]
    place = np.full(spec.batch, -1)
    place[spec.own_rows] = np.arange(len(rows))

    def make_array(name: str) -> jax.Array:
        host = np.stack([row[name] for row in rows])

        def part(index: Any) -> np.ndarray:
            return host[place[index[0]]][:, index[1]]

        return jax.make_array_from_callback((spec.batch, spec.seq_len), spec.sharding, part)

    return {name: make_array(name) for name in rows[0]}
