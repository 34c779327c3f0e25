"""Worker processes that are spawned, ignore the signals of a run, and exit with their parent."""

import os
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from maxhydra.record.processes import exit_with_parent, ignore_run_signals, spawn_context


class WorkerDied(Exception):
    """A worker process exited before it returned its result."""


class Workers(ThreadPoolExecutor):
    """An executor whose threads each forward their calls to a dedicated process.

    The processes share no lock and no pipe, unlike those of a ProcessPoolExecutor: there, a process that is killed
    while it writes its result leaves the other processes, and the pool, waiting forever.
    """

    def __init__(self, count: int, initializer: Callable[[], None]):
        """Each of `count` processes calls `initializer` once, before its first call."""
        super().__init__(count, thread_name_prefix="worker")
        self._initializer = initializer
        self._thread_local = threading.local()
        self._lock = threading.Lock()
        self._processes: list[BaseProcess] = []
        self._kill = weakref.finalize(self, _kill, self._processes)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Call a function in a worker process; it is pickled by name."""
        return super().submit(self._call, function, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Kill the workers, even in the middle of a call."""
        with self._lock:
            self._kill()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _call(self, function: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            pipe: Connection = getattr(self._thread_local, "pipe", None) or self._start()
            pipe.send((function, args, kwargs))
            is_done, result = pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        if not is_done:
            raise result
        return result

    def _start(self) -> Connection:
        """Start the process of this thread. Only that process holds its end of the pipe, which breaks when it exits."""
        with self._lock:
            if not self._kill.alive:
                raise WorkerDied
            self._thread_local.pipe, worker_end = spawn_context.Pipe()
            process = spawn_context.Process(target=_serve, args=(worker_end, self._initializer), daemon=True)
            process.start()
            worker_end.close()
            self._processes.append(process)
        return self._thread_local.pipe


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _serve(pipe: Connection, initializer: Callable[[], None]) -> None:
    """Main function of a worker process: serve calls until the parent closes the pipe."""
    ignore_run_signals()
    # The number of workers is chosen to fill the cores; tokenizer threads within each would only oversubscribe them.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    exit_with_parent()
    initializer()
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            result = True, function(*args, **kwargs)
        except Exception as error:  # any exception is raised again where the result is awaited
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            result = False, error
        pipe.send(result)
