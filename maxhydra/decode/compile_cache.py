"""Compiled programs by name: made when they are first needed, or ahead of that in a thread.

Compiling takes longer than many a step, so a program that does more than is needed is used where there is one, until it
has been used so often that the right one pays; that is then compiled while the other goes on.
"""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, Self, TypeVar


class ProgramKey(Hashable, Protocol):
    """A program's name: what it can do, and what a use of it costs."""

    def holds(self, other: Self) -> bool:
        """Whether it can do the other's work."""
        ...

    @property
    def size(self) -> int: ...

    @property
    def length(self) -> int:
        """Steps of a use."""
        ...


Name = TypeVar("Name", bound=ProgramKey)
Program = Callable[..., Any]
# Steps that may be wasted on programs that are too large before the right one is compiled.
PATIENCE = 16


class CompileCache(Generic[Name]):
    """Compiles each program once, whoever asks for it; two at a time, as compilers use more than one core anyway."""

    def __init__(self, compile: Callable[[Name], Program], *, steady: bool):
        """`steady`: no program ever does the work of another, since which are ready depends on the time."""
        self._compile, self._is_steady = compile, steady
        self._found: dict[Name, Future[Program]] = {}
        self._waste: dict[Name, float] = {}
        self._stood_in = 0
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="decode-compile")

    def begin(self, name: Name) -> Future[Program]:
        """Have it ready soon."""
        with self._lock:
            if name not in self._found:
                self._found[name] = self._threads.submit(self._compile, name)
            return self._found[name]

    def get(self, name: Name) -> Program:
        """The program, as soon as it is there."""
        return self.begin(name).result()

    def choose(self, name: Name, *, eventual: Name) -> Name:
        """The program to use for work of this name. `eventual`: the name it will soon have, if there is none yet."""
        if self._is_steady or self.is_ready(name):
            return name
        with self._lock:
            ready = [other for other, found in self._found.items() if found.done() and other.holds(name)]
        if not ready:
            return name if name in self._found or not eventual.holds(name) else eventual
        smallest = min(ready, key=lambda other: other.size)
        self._stood_in += 1
        self._waste[name] = self._waste.get(name, 0) + name.length * (smallest.size / name.size - 1)
        if self._waste[name] > PATIENCE:
            self.begin(name)
        return smallest

    def is_ready(self, name: Name) -> bool:
        return name in self._found and self._found[name].done()

    def settled(self) -> int:
        """Waits until nothing is compiled any more. How often so far a program was made or stood in for another: work
        that does not change it has all that it needs."""
        with self._lock:
            found = list(self._found.values())
        wait(found)
        return len(found) + self._stood_in

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
