"""Batches as global arrays: each process reads only the rows that its own devices hold."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from maxhydra.data.rows import Row, RowSpec

# The CPU backend uses host memory without a copy if it starts at a multiple of this many bytes.
ALIGNMENT = 64

# Global arrays by column name: [batch, seq_len], or [batch] for a column with one number per row.
Batch = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class BatchSpec:
    """Size and sharding of the batches of a run."""

    rows: RowSpec
    batch: int
    """Sequences in a global batch."""
    sharding: jax.sharding.Sharding
    """Sharding of [batch, seq_len] over the devices of all processes."""

    ramp: tuple[tuple[int, int], ...] = ()
    """Batch size ramp: (number of sequences up to which it applies, size), ascending."""

    def batch_at(self, sequences: int) -> int:
        """Size of the batch that starts after `sequences` sequences."""
        return next((size for until, size in self.ramp if sequences < until), self.batch)

    def local_rows(self, batch: int) -> np.ndarray:
        """Rows of a batch that the devices of this process hold at least partly, ascending."""
        index_map = self.sharding.addressable_devices_indices_map((batch, self.rows.seq_len))
        rows = [np.arange(batch)[index[0]] for index in index_map.values() if index is not None]
        return np.unique(np.concatenate(rows))

    def sharding_of(self, dimensions: int) -> jax.sharding.Sharding:
        """Sharding of a column: that of the rows for [batch, seq_len], its batch axis for [batch]."""
        if dimensions > 1:
            return self.sharding
        assert isinstance(self.sharding, NamedSharding)
        return NamedSharding(self.sharding.mesh, PartitionSpec(*self.sharding.spec[:dimensions]))


B = TypeVar("B")
# (local rows, batch spec, size of this batch) -> batch
Assemble = Callable[[list[Row], BatchSpec, int], B]


def local_rows(rows: list[Row], spec: BatchSpec, batch: int) -> list[Row]:
    """Return the local rows unchanged, on the host."""
    return rows


def make_batch(rows: Sequence[Row], spec: BatchSpec, batch: int) -> Batch:
    """Build the global batch from the rows that this process holds."""
    local = spec.local_rows(batch)
    local_index = np.full(batch, -1)
    local_index[local] = np.arange(len(local))

    def make_array(name: str) -> jax.Array:
        host = _stack([row[name] for row in rows])

        def read_shard(index: Any) -> np.ndarray:
            # All rows from the first to the last of a device are local, so they are adjacent: no copy.
            first, last, _ = index[0].indices(batch)
            start = int(local_index[first])
            return host[(slice(start, start + last - first), *index[1:])]

        return jax.make_array_from_callback((batch, *host.shape[1:]), spec.sharding_of(host.ndim), read_shard)

    return {name: make_array(name) for name, column in rows[0].items() if column.dtype != object}


def _stack(columns: Sequence[np.ndarray]) -> np.ndarray:
    """Stack columns into one array that starts at a multiple of ALIGNMENT bytes."""
    shape, dtype = (len(columns), *columns[0].shape), columns[0].dtype
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + ALIGNMENT, np.uint8)
    start = -buffer.ctypes.data % ALIGNMENT
    stacked = buffer[start : start + size].view(dtype).reshape(shape)
    np.stack(columns, out=stacked)
    return stacked
