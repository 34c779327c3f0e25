"""Compiled programs by name: made when they are first needed, or ahead of that in a thread."""

import threading
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

Name = TypeVar("Name", bound=Hashable)
Program = Callable[..., Any]


class Compiled(Generic[Name]):
    """Compiles each program once, whoever asks for it; two at a time, as compilers use more than one core anyway."""

    def __init__(self, compile: Callable[[Name], Program]):
        self._compile = compile
        self._found: dict[Name, Future[Program]] = {}
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

    def ready(self) -> list[Name]:
        """Programs that are there now."""
        with self._lock:
            return [name for name, found in self._found.items() if found.done() and not found.exception()]

    def __contains__(self, name: Name) -> bool:
        return name in self._found

    def close(self) -> None:
        self._threads.shutdown(wait=True, cancel_futures=True)
