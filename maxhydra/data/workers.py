"""Worker processes: started afresh, deaf to signals that are meant for the run, and gone when it is."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, parent_process


def worker_processes(count: int, begin: Callable[[], None]) -> ProcessPoolExecutor:
    """A pool of so many processes, each of which calls `begin` first.

    Spawned, not forked: the threads of jax and of tokenizers do not survive a fork.
    """
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_start, initargs=(begin,))


def _start(begin: Callable[[], None]) -> None:
    # A terminal or a cluster signals every process of a run, which then saves its end: it needs its workers for that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # There are as many workers as were asked for; a tokenizer's own threads in each would only crowd the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    begin()


def _end_with_parent() -> None:
    """A pool's processes wait for work for ever, though the run was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
