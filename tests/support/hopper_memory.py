"""Memory, barriers and asynchronous units of the GPU of hopper.py.

What is read too early is not a number, or a Race: shared memory before those who wrote it have made that known, an
accumulator before its product has ended. So is what is written over too early: an asynchronous unit reads its operands
when it begins and when it must have ended, and both must agree.
"""

import itertools
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from jax.experimental import pallas as pl

# Taken back where memory is made: it has its logical shape from the start.
LAYOUTS = ("UnswizzleRef", "UntilingTransform")


class Race(Exception):
    """Something depends on what comes first."""


class Memory:
    def __init__(self, values: np.ndarray, space: str) -> None:
        self.values, self.space = values, space
        # Who wrote a number of shared memory and has not yet said so to the asynchronous units; zero: nobody.
        self.writers = np.zeros(values.shape, np.int8) if space == "smem" else None
        # The same in the programs of a cluster, and whom of them a barrier tells.
        self.everywhere: tuple[Memory, ...] = (self,)
        self.reached: set[int] = set()

    @classmethod
    def empty(cls, shape: tuple[int, ...], dtype: Any, space: str) -> "Memory":
        memory = cls(np.zeros(shape, dtype), space)
        # Accumulators begin with zeros.
        if space != "regs":
            memory.at(()).spoil()
        return memory

    def at(self, transforms: Iterable[Any]) -> "View":
        return View(self, tuple(itertools.dropwhile(lambda one: type(one).__name__ in LAYOUTS, transforms)))


class View(NamedTuple):
    memory: Memory
    transforms: tuple[Any, ...]

    @property
    def values(self) -> np.ndarray:
        return self.of(self.memory.values)

    @property
    def writers(self) -> np.ndarray:
        return self.of(self.memory.writers)

    def of(self, values: np.ndarray) -> np.ndarray:
        for transform in self.transforms:
            match type(transform).__name__:
                case "NDIndexer":
                    # Copies from and to global memory may reach beyond its end.
                    reach = None if self.memory.space == "gmem" else values.shape
                    values = values[(*_places(transform.indices, reach), ...)]
                case "TransposeTransform":
                    values = values.transpose(transform.permutation)
                case "ExtractAliasedRef":
                    values = self.part(values, transform)
                case "UnswizzleRef":
                    pass
                case "UntilingTransform":
                    *outer, down, across, rows, columns = values.shape
                    tiled, values = values, values.swapaxes(-2, -3).reshape(*outer, down * rows, across * columns)
                    assert np.shares_memory(tiled, values), "several tiles side by side in memory with several uses"
                case other:
                    raise NotImplementedError(f"memory seen through {other}")
        return values

    def part(self, values: np.ndarray, transform: Any) -> np.ndarray:
        """Of bytes, what is there in one of their uses; of their writers, those of each number's first byte."""
        dtype = np.dtype(transform.dtype)
        some = values[transform.offset : transform.offset + dtype.itemsize * math.prod(transform.shape)]
        return (some.view(dtype) if values is self.memory.values else some[:: dtype.itemsize]).reshape(transform.shape)

    def spoil(self) -> None:
        """Nobody knows what is there."""
        values = self.values
        values[...] = np.array(-1).astype(values.dtype) if np.issubdtype(values.dtype, np.integer) else np.nan
        if self.memory.writers is not None:
            self.writers[...] = 0

    def sent(self) -> np.ndarray:
        """As an asynchronous unit reads it."""
        if self.memory.writers is not None and self.writers.any():
            raise Race("shared memory is read before commit_smem() has made known what was written")
        return self.values.copy()


def _places(indices: Iterable[Any], reach: tuple[int, ...] | None) -> Iterable[Any]:
    for axis, index in enumerate(indices):
        if isinstance(index, pl.Slice):
            first, beyond = int(index.start), int(index.start) + (int(index.size) - 1) * index.stride + 1
            place = slice(first, beyond, index.stride)
        else:
            assert np.ndim(index) == 0, "an array of indices"
            first, place, beyond = int(index), int(index), int(index) + 1
        if first < 0 or (reach is not None and beyond > reach[axis]):
            raise IndexError(f"{first}:{beyond} of {reach}")
        yield place


class Barrier:
    def __init__(self, arrivals: int) -> None:
        self.arrivals, self.arrived, self.phases = arrivals, 0, 0
        self.seen: dict[int, int] = {}

    def arrive(self) -> None:
        self.arrived += 1
        if self.arrived == self.arrivals:
            self.arrived, self.phases = 0, self.phases + 1

    def has_passed(self, number: int) -> bool:
        ahead = self.phases - self.seen.get(number, 0)
        if ahead > 1:
            # A wait knows phases by their parity.
            raise Race("a barrier went on by two phases while a warpgroup was to wait for the first")
        return ahead == 1

    def pass_by(self, number: int) -> None:
        self.seen[number] = self.seen.get(number, 0) + 1


class Product:
    """acc += left @ right, of the matrix unit; its operands in shared memory are read at any time before it ends."""

    def __init__(self, acc: View, *operands: Any) -> None:
        self.acc, self.operands = acc, operands
        self.first_read = self.read()

    def read(self) -> list[np.ndarray]:
        return [one.sent() if isinstance(one, View) else np.asarray(one) for one in self.operands]

    def finish(self) -> None:
        left, right = _unchanged(self.first_read, self.read())
        wide = self.acc.values.dtype
        # Not by a library, whose threads wait for each other longer than such a product takes.
        self.acc.values[...] += np.einsum("ik,kj->ij", left.astype(wide), right.astype(wide))


class Store:
    """From shared to global memory."""

    def __init__(self, source: View, target: View, operation: str | None) -> None:
        self.source, self.target, self.operation = source, target, operation
        self.first_read = source.sent()

    def finish(self) -> None:
        (values,) = _unchanged([self.first_read], [self.source.sent()])
        target = self.target.values
        values = values[tuple(map(slice, target.shape))]
        combine = {None: lambda _, new: new, "add": np.add, "min": np.minimum, "max": np.maximum}[self.operation]
        target[...] = combine(target, values)


class Load(NamedTuple):
    """From global to shared memory."""

    source: View
    target: View
    barrier: Barrier

    def finish(self) -> None:
        source, target = self.source.values, self.target.values
        # Beyond the end of global memory lie zeros.
        target[...] = 0
        target[tuple(map(slice, source.shape))] = source
        self.barrier.arrive()


def _unchanged(before: list[np.ndarray], now: list[np.ndarray]) -> list[np.ndarray]:
    if any(one.tobytes() != other.tobytes() for one, other in zip(before, now, strict=True)):
        raise Race("shared memory is written over while an asynchronous unit may still read it")
    return now
