"""The order in which the records of an epoch are read: a pure function of seed and epoch."""

import dataclasses
from functools import cached_property, lru_cache

import numpy as np

# Number of groups that are shuffled together, if records can only be read by the group.
GROUPS_PER_WINDOW = 16


# Up to this many records, an epoch's order is an explicit permutation (16 MB); above, each index is computed separately
# by grain's index_shuffle, at 4 microseconds (280 for a hundred records, as its cycle walking then takes many rounds).
IN_MEMORY = 2**21

# Number of cached permutations, 1 GB at most. The sources of a mixture alternate row by row, as do streams, and
# rebuilding a permutation of a million records for each row would take 60 ms.
CACHED = 64


@dataclasses.dataclass(frozen=True)
class ShuffleOrder:
    """The order of `length` records. With `groups`, whole groups are shuffled, then records within a few groups."""

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
        seed = int(_rng(self.seed, epoch).integers(2**32))
        last = self.length - 1
        # Imported here because few datasets are this large, and grain takes 0.1 s of the start of every run.
        from grain.experimental import index_shuffle  # noqa: PLC0415

        return np.array([index_shuffle(i, last, seed, 4) for i in range(start, stop)], np.int64)

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
        """Hash, computed once: with a hundred thousand groups it takes half a millisecond."""
        return hash((self.length, self.seed, self.shuffle, self.groups))

    @cached_property
    def first_of_group(self) -> np.ndarray:
        assert self.groups is not None
        return np.cumsum((0, *self.groups))


@lru_cache(maxsize=CACHED)
def _permutation(length: int, seed: int, epoch: int) -> np.ndarray:
    return _rng(seed, epoch).permutation(length)


@lru_cache(maxsize=CACHED)
def _windows(order: ShuffleOrder, epoch: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """Shuffled groups of an epoch, GROUPS_PER_WINDOW per window, and the position where each window starts."""
    assert order.groups is not None
    shuffled = _rng(order.seed, epoch).permutation(len(order.groups))
    windows = [shuffled[i : i + GROUPS_PER_WINDOW] for i in range(0, len(shuffled), GROUPS_PER_WINDOW)]
    sizes = np.array(order.groups)
    return np.cumsum([0, *(int(sizes[window].sum()) for window in windows)]), windows


@lru_cache(maxsize=CACHED)
def _window(order: ShuffleOrder, epoch: int, window: int) -> np.ndarray:
    """Shuffled records of one window of groups."""
    _, windows = _windows(order, epoch)
    first = order.first_of_group
    records = np.concatenate([np.arange(first[group], first[group + 1]) for group in windows[window]])
    return _rng(order.seed, epoch, window).permutation(records)


def _rng(*key: int) -> np.random.Generator:
    return np.random.default_rng(key)


def share_of(length: int, share: int, shares: int) -> tuple[int, int]:
    """Positions of an epoch that belong to one share: first, and one past the last."""
    return length * share // shares, length * (share + 1) // shares
