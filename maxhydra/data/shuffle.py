"""In what order the records of an epoch are read: a pure function of seed and epoch."""

import dataclasses
from functools import cached_property, lru_cache

import grain
import numpy as np

# Groups of records that are shuffled together, where records can only be read by the group.
GROUPS_TOGETHER = 16


# Up to so many records, an epoch's order is a list, 16 MB; over it each place is computed by itself, at 4 microseconds
# (and 280 on a hundred records, where it searches long).
IN_MEMORY = 2**21

# Lists that are kept, 1 GB at most: the sources of a mixture take turns row by row, and so do streams, and to make one
# of a million records anew for each row takes 60 milliseconds.
KEPT = 64


@dataclasses.dataclass(frozen=True)
class ShuffleOrder:
    """The order of `length` records. With `groups`, whole groups are shuffled, then records among a few groups."""

    length: int
    seed: int
    shuffle: bool
    groups: tuple[int, ...] | None = None

    def indices(self, epoch: int, start: int, stop: int) -> np.ndarray:
        """Records at positions start to stop - 1 of an epoch."""
        if not self.shuffle:
            return np.arange(start, stop)
        if self.groups is not None:
            return self._grouped(epoch, start, stop)
        if self.length <= IN_MEMORY:
            return _permutation(self.length, self.seed, epoch)[start:stop]
        seed = int(_random(self.seed, epoch).integers(2**32))
        last = self.length - 1
        shuffled = grain.experimental.index_shuffle
        return np.array([shuffled(i, last, seed, 4) for i in range(start, stop)], np.int64)

    def _grouped(self, epoch: int, start: int, stop: int) -> np.ndarray:
        bounds, windows = _windows(self, epoch)
        parts = []
        for window in range(np.searchsorted(bounds, start, "right") - 1, len(windows)):
            low, high = int(bounds[window]), int(bounds[window + 1])
            if low >= stop:
                break
            parts.append(_window(self, epoch, window)[max(start - low, 0) : min(stop, high) - low])
        return np.concatenate(parts) if parts else np.empty(0, np.int64)

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        """Computed once: a hundred thousand groups would take half a millisecond each time."""
        return hash((self.length, self.seed, self.shuffle, self.groups))

    @cached_property
    def first_of_group(self) -> np.ndarray:
        assert self.groups is not None
        return np.cumsum((0, *self.groups))


@lru_cache(maxsize=KEPT)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return _random(seed, epoch).permutation(length)


@lru_cache(maxsize=KEPT)
def _windows(order: ShuffleOrder, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """The groups of an epoch in their order, a few at a time, and the position at which each lot begins."""
    assert order.groups is not None
    shuffled = _random(order.seed, epoch).permutation(len(order.groups))
    windows = [shuffled[i : i + GROUPS_TOGETHER] for i in range(0, len(shuffled), GROUPS_TOGETHER)]
    sizes = np.array(order.groups)
    return np.cumsum([0, *(int(sizes[window].sum()) for window in windows)]), windows


@lru_cache(maxsize=KEPT)
def _window(order: ShuffleOrder, epoch: int, window: int) -> np.ndarray:
    """The records of one lot of groups, shuffled."""
    _, windows = _windows(order, epoch)
    first = order.first_of_group
    records = np.concatenate([np.arange(first[group], first[group + 1]) for group in windows[window]])
    return _random(order.seed, epoch, window).permutation(records)


def _random(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def share_of(length: int, share: int, shares: int) -> tuple[int, int]:
    """Positions of an epoch that one of several readers takes: first, and one past the last."""
    return length * share // shares, length * (share + 1) // shares
