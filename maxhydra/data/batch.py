"""A batch as global arrays: each process reads the rows that its own devices hold, and no others."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.data.rows import Row, RowSpec

# Global arrays [batch, seq_len], by the names of a row.
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """What every batch looks like."""

    rows: RowSpec
    batch: int
    """Sequences in a global batch."""
    sharding: jax.sharding.Sharding
    """How [batch, seq_len] lies on the devices of all processes."""

    ramp: tuple[tuple[int, int], ...] = ()
    """Smaller batches at the start: (sequences before which it holds, size), in order."""

    def batch_at(self, sequences: int) -> int:
        """Size of the batch that begins after so many sequences."""
        return next((size for until, size in self.ramp if sequences < until), self.batch)

    def own_rows(self, batch: int) -> np.ndarray:
        """Rows of a batch of some size of which this process's devices hold any part, in order."""
        places = self.sharding.addressable_devices_indices_map((batch, self.rows.seq_len))
        held = [np.arange(batch)[index[0]] for index in places.values() if index is not None]
        return np.unique(np.concatenate(held))


def make_batch(rows: Sequence[Row], spec: BatchSpec, batch: int) -> Batch:
    """The global batch of which `rows` are those that this process owns."""
    own = spec.own_rows(batch)
    place = np.full(batch, -1)
    place[own] = np.arange(len(own))

    def make_array(name: str) -> jax.Array:
        host = np.stack([row[name] for row in rows])

        def part(index: Any) -> np.ndarray:
            return host[place[index[0]]][:, index[1]]

        return jax.make_array_from_callback((batch, *host.shape[1:]), spec.sharding, part)

    return {name: make_array(name) for name, column in rows[0].items() if column.dtype != object}
