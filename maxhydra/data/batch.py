"""A batch as global arrays: each process reads the rows that its own devices hold, and no others."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.data.rows import Row, RowSpec

# A CPU takes memory that begins at such a multiple as it is, and copies any other.
ALIGNMENT = 64

# Global arrays [batch, seq_len], or [batch] where a row has one number, by the names of a row.
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

    def sharding_of(self, dimensions: int) -> jax.sharding.Sharding:
        """How a column lies: one with a number a row, [batch], as the rows do."""
        if dimensions > 1:
            return self.sharding
        assert isinstance(self.sharding, NamedSharding)
        return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[:dimensions]))


B = TypeVar("B")
# (own rows, what batches look like, size of this one) -> what is handed out.
Assemble = Callable[[list[Row], BatchSpec, int], B]


def own_rows(rows: list[Row], spec: BatchSpec, batch: int) -> list[Row]:
    """Rows as they are, on the host."""
    return rows


def make_batch(rows: Sequence[Row], spec: BatchSpec, batch: int) -> Batch:
    """The global batch of which `rows` are those that this process owns."""
    own = spec.own_rows(batch)
    place = np.full(batch, -1)
    place[own] = np.arange(len(own))

    def make_array(name: str) -> jax.Array:
        host = _stack([row[name] for row in rows])

        def part(index: Any) -> np.ndarray:
            # All rows between the first and the last of a device are owned, so they lie together: no copy.
            first, last, _ = index[0].indices(batch)
            start = int(place[first])
            return host[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((batch, *host.shape[1:]), spec.sharding_of(host.ndim), part)

    return {name: make_array(name) for name, column in rows[0].items() if column.dtype != object}


def _stack(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Columns as one array that begins at a multiple of ALIGNMENT bytes."""
    shape, dtype = (len(columns), *columns[0].shape), columns[0].dtype
    size = math.prod(shape) * dtype.itemsize
    room = np.empty(size + ALIGNMENT, np.uint8)
    start = -room.ctypes.data % ALIGNMENT
    stacked = room[start : start + size].view(dtype).reshape(shape)
    np.stack(columns, out=stacked)
    return stacked
