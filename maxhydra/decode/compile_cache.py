"""Compile cache: compiled programs by key, compiled on first use or earlier in a background thread.

Compiling takes longer than many steps. So a compiled program for a larger bucket is used while the exact one does not
exist; once it has wasted enough work, the exact one is compiled in the background. After a warm-up, which compiles a
program for every batch in advance, nothing is compiled any more.
"""

import os
import threading
import time
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, Generic, Protocol, Self, TypeVar


class ProgramKey(Hashable, Protocol):
    """Identifies a program: the batches it can run and the cost of a call."""

    def covers(self, other: Self) -> bool:
        """Return True if this program can run the other's batches."""
        ...

    @property
    def size(self) -> int:
        """Relative cost of a call."""
        ...

    @property
    def num_steps(self) -> int:
        """Decode steps per call."""
        ...


Key = TypeVar("Key", bound=ProgramKey)
Program = Callable[..., Any]
# Steps' worth of work that may be wasted on larger programs before the exact one is compiled.
MAX_WASTED_STEPS = 16
NUM_RETRIES, RETRY_SECONDS = 3, 0.5


class CompileCache(Generic[Key]):
    """Compiles each program once; half as many as cores at a time, since compilers use several themselves."""

    def __init__(self, compile: Callable[[Key], Program], *, deterministic: bool):
        """`deterministic`: never substitute a larger program, since which ones are ready depends on timing."""
        self._compile, self._deterministic = compile, deterministic
        self._programs: dict[Key, Future[Program]] = {}
        self._wasted_steps: dict[Key, float] = {}
        self._num_substitutions = 0
        self._is_warm = False
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(max(2, (os.cpu_count() or 1) // 2), thread_name_prefix="decode-compile")

    def start(self, key: Key) -> Future[Program]:
        """Start compiling a program, unless that happened before."""
        with self._lock:
            if key not in self._programs:
                self._programs[key] = self._threads.submit(self._compile_program, key)
            return self._programs[key]

    def _compile_program(self, key: Key) -> Program:
        """Compile; when many threads compile at once, the compiler sometimes cannot start its assembler: try again."""
        for _ in range(NUM_RETRIES):
            try:
                return self._compile(key)
            except RuntimeError as error:
                if "Failed to launch" not in str(error):
                    raise
                time.sleep(RETRY_SECONDS)
        return self._compile(key)

    def get(self, key: Key) -> Program:
        """Return the program, waiting for its compilation."""
        return self.start(key).result()

    def warm_up(self, keys: Iterable[Key]) -> list[Future[Program]]:
        """Start compiling these programs; from now on, the smallest of them that covers a batch is used."""
        self._is_warm = True
        return [self.start(key) for key in keys]

    @property
    def num_programs(self) -> int:
        return len(self._programs)

    def choose(self, key: Key, *, eventual: Key) -> Key:
        """Return the key of the program to use for a batch of this key.

        `eventual`: the key that batches will soon have; compiled instead if no program covers `key` yet.
        """
        if self._deterministic or self.is_ready(key):
            return key
        with self._lock:
            ready = [other for other, program in self._programs.items() if program.done() and other.covers(key)]
        if not ready:
            return key if key in self._programs or not eventual.covers(key) else eventual
        smallest = min(ready, key=lambda other: other.size)
        if self._is_warm:
            return smallest
        self._num_substitutions += 1
        self._wasted_steps[key] = self._wasted_steps.get(key, 0) + key.num_steps * (smallest.size / key.size - 1)
        if self._wasted_steps[key] > MAX_WASTED_STEPS:
            self.start(key)
        return smallest

    def is_ready(self, key: Key) -> bool:
        return key in self._programs and self._programs[key].done()

    def wait_for_compiles(self) -> int:
        """Wait until nothing is being compiled; return how many programs were compiled or substituted so far.

        A workload that does not change this count has all the programs it needs.
        """
        with self._lock:
            programs = list(self._programs.values())
        wait(programs)
        return len(programs) + self._num_substitutions

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
