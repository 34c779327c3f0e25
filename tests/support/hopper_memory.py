"""Memory, barriers and asynchronous operations of the simulated GPU in hopper.py.

Data that is read too early is NaN or raises a Race: shared memory before its writers have committed it, an accumulator
before its wgmma has finished. So does data that is overwritten too early: an asynchronous operation reads its operands
when it is issued and at the latest time it may finish, and both must agree.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import pallas as pl

# Ignored: simulated memory has its logical shape.
LAYOUTS = ("UnswizzleRef", "UntilingTransform")


class Race(Exception):
    """The result depends on the order of events."""


class Memory:
    def __init__(self, values: np.ndarray, space: str) -> None:
        self.values, self.space = values, space
        # The warpgroup that wrote an element of shared memory and has not yet committed it; zero: none.
        self.writers = np.zeros(values.shape, np.int8) if space == "smem" else None
        # The same memory in all programs of a cluster, and the members at which a barrier arrives.
        self.copies: tuple[Memory, ...] = (self,)
        self.multicast_members: set[int] = set()

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, space: str) -> "Memory":
        memory = cls(np.zeros(shape, dtype), space)
        # Accumulators start at zero.
        if space != "regs":
            memory.at(()).invalidate()
        return memory

    def at(self, transforms: Iterable[Any]) -> "View":
        return View(self, tuple(itertools.dropwhile(lambda transform: type(transform).__name__ in LAYOUTS, transforms)))


class View(NamedTuple):
    memory: Memory
    transforms: tuple[Any, ...]

    @property
    def values(self) -> np.ndarray:
        return self.apply(self.memory.values)

    @property
    def writers(self) -> np.ndarray:
        return self.apply(self.memory.writers)

    def apply(self, values: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            match type(transform).__name__:
                case "NDIndexer":
                    # Copies from and to global memory may extend beyond its end.
                    bounds = None if self.memory.space == "gmem" else values.shape
                    values = values[(*_numpy_indices(transform.indices, bounds), ...)]
                case "TransposeTransform":
                    values = values.transpose(transform.permutation)
                case "ExtractAliasedRef":
                    values = self.aliased(values, transform)
                case "UnswizzleRef":
                    pass
                case "UntilingTransform":
                    *outer, down, across, rows, columns = values.shape
                    tiled, values = values, values.swapaxes(-2, -3).reshape(*outer, down * rows, across * columns)
                    assert np.shares_memory(tiled, values), "adjacent tiles in aliased memory are unsupported"
                case other:
                    raise NotImplementedError(f"unsupported memory transform: {other}")
        return values

    def aliased(self, values: np.ndarray, transform: Any) -> np.ndarray:
        """One of the aliased uses of a byte array; for writers, those of each element's first byte."""
        dtype = np.dtype(transform.dtype)
        data = values[transform.offset : transform.offset + dtype.itemsize * math.prod(transform.shape)]
        return (data.view(dtype) if values is self.memory.values else data[:: dtype.itemsize]).reshape(transform.shape)

    def invalidate(self) -> None:
        """Fill with NaN, or -1 for integers: the contents are undefined."""
        values = self.values
        values[...] = np.array(-1).astype(values.dtype) if np.issubdtype(values.dtype, np.integer) else np.nan
        if self.memory.writers is not None:
            self.writers[...] = 0

    def read_async(self) -> np.ndarray:
        """Read as an asynchronous operation does."""
        if self.memory.writers is not None and self.writers.any():
            raise Race("shared memory is read by an asynchronous operation before commit_smem()")
        return self.values.copy()


def _numpy_indices(indices: Iterable[Any], bounds: tuple[int, ...] | None) -> Iterable[Any]:
    for axis, index in enumerate(indices):
        if isinstance(index, pl.Slice):
            first, end = int(index.start), int(index.start) + (int(index.size) - 1) * index.stride + 1
            numpy_index = slice(first, end, index.stride)
        else:
            assert np.ndim(index) == 0, "arrays of indices are unsupported"
            first, numpy_index, end = int(index), int(index), int(index) + 1
        if first < 0 or (bounds is not None and end > bounds[axis]):
            raise IndexError(f"{first}:{end} is out of bounds for {bounds}")
        yield numpy_index


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.arrived, self.phases = arrivals, 0, 0
        self.passed: dict[int, int] = {}

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.phases = 0, self.phases + 1

    def has_passed(self, number: int) -> bool:
        phases_ahead = self.phases - self.passed.get(number, 0)
        if phases_ahead > 1:
            # A wait distinguishes phases only by their parity.
            raise Race("a barrier completed two phases before a warpgroup had waited for the first")
        return phases_ahead == 1

    def pass_by(self, number: int) -> None:
        self.passed[number] = self.passed.get(number, 0) + 1


class Wgmma:
    """acc += left @ right; its operands in shared memory may be read at any time before it finishes."""

    def __init__(self, acc: View, *operands: Any) -> None:
        self.acc, self.operands = acc, operands
        self.first_read = self.read()

    def read(self) -> list[np.ndarray]:
        return [x.read_async() if isinstance(x, View) else np.asarray(x) for x in self.operands]

    def finish(self) -> None:
        left, right = _check_unchanged(self.first_read, self.read())
        wide = self.acc.values.dtype
        # Not by BLAS, whose thread synchronisation takes longer than such a small matmul.
        self.acc.values[...] += np.einsum("ik,kj->ij", left.astype(wide), right.astype(wide))


class Store:
    """An asynchronous copy from shared to global memory."""

    def __init__(self, source: View, target: View, operation: str | None) -> None:
        self.source, self.target, self.operation = source, target, operation
        self.first_read = source.read_async()

    def finish(self) -> None:
        (values,) = _check_unchanged([self.first_read], [self.source.read_async()])
        target = self.target.values
        values = values[tuple(map(slice, target.shape))]
        combine = {None: lambda _, new: new, "add": np.add, "min": np.minimum, "max": np.maximum}[self.operation]
        target[...] = combine(target, values)


class Load(NamedTuple):
    """An asynchronous copy from global to shared memory."""

    source: View
    target: View
    barrier: Barrier

    def finish(self) -> None:
        source, target = self.source.values, self.target.values
        # Reads beyond the end of global memory give zeros.
        target[...] = 0
        target[tuple(map(slice, source.shape))] = source
        self.barrier.arrive()


def _check_unchanged(before: list[np.ndarray], now: list[np.ndarray]) -> list[np.ndarray]:
    if any(a.tobytes() != b.tobytes() for a, b in zip(before, now, strict=True)):
        raise Race("shared memory is overwritten while an asynchronous operation may still read it")
    return now
