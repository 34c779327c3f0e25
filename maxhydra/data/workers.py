"""Worker processes: started afresh, deaf to signals that are meant for the run, and gone when it is."""

import os
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

# Not forked: the threads of jax and of tokenizers do not survive a fork.
spawn_context = get_context("spawn")


class WorkerDied(Exception):
    """A worker process ended in the middle of its work."""


class Workers(ThreadPoolExecutor):
    """So many threads, each of which hands its work to a process of its own that has called `begin` first.

    The processes share no lock and no pipe, as those of a ProcessPoolExecutor do: there, one that is killed while it
    writes its result leaves the others, and the pool, waiting for ever.
    """

    def __init__(self, count: int, begin: Callable[[], None]):
        super().__init__(count, thread_name_prefix="worker")
        self._begin = begin
        self._own = threading.local()
        self._lock = threading.Lock()
        self._processes: list[BaseProcess] = []
        self._kill = weakref.finalize(self, _kill, self._processes)

    def submit(self, work: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Let a process call a function, which it finds by its name."""
        return super().submit(self._ask, work, args, kwargs)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers now, whatever they are at."""
        with self._lock:
            self._kill()
        super().shutdown(wait, cancel_futures=cancel_futures)

    def _ask(self, work: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        try:
            pipe: Connection = getattr(self._own, "pipe", None) or self._start()
            pipe.send((work, args, kwargs))
            is_done, result = pipe.recv()
        except (EOFError, OSError):
            raise WorkerDied from None
        if not is_done:
            raise result
        return result

    def _start(self) -> Connection:
        """The process of this thread. It alone holds its end of the pipe, which therefore breaks when it ends."""
        with self._lock:
            if not self._kill.alive:
                raise WorkerDied
            self._own.pipe, theirs = spawn_context.Pipe()
            process = spawn_context.Process(target=_serve, args=(theirs, self._begin), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
        return self._own.pipe


def _kill(processes: list[BaseProcess]) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()


def _serve(pipe: Connection, begin: Callable[[], None]) -> None:
    """What a worker does: calls until there is no one left to ask."""
    # A terminal or a cluster signals every process of a run, which then saves its end: it needs its workers for that.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    # There are as many workers as were asked for; a tokenizer's own threads in each would only crowd the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin()
    while True:
        try:
            work, args, kwargs = pipe.recv()
        except EOFError:
            return
        try:
            result = True, work(*args, **kwargs)
        except Exception as error:  # whatever it is, it is raised where the result is waited for
            error.add_note(f"in a worker process:\n{traceback.format_exc()}")
            result = False, error
        pipe.send(result)


def _end_with_parent() -> None:
    """Work that no one waits for any more may be hours long."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
