"""Worker processes: started afresh, deaf to signals that are meant for the run, and gone when it is."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from multiprocessing.connection import Connection

# Not forked: the threads of jax and of tokenizers do not survive a fork.
SPAWN = get_context("spawn")


class Workers(ProcessPoolExecutor):
    """A pool of so many processes, each of which calls `begin` first.

    They live as long as the other end of a pipe is open. A pool alone would leave them behind when its process is
    killed, and would wait for ever for those that do not heed SIGTERM after one has died.
    """

    def __init__(self, count: int, begin: Callable[[], None]):
        alive, self._alive = SPAWN.Pipe(duplex=False)
        super().__init__(count, mp_context=SPAWN, initializer=_start, initargs=(alive, begin))

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the workers now, whatever they are at."""
        self._alive.close()
        super().shutdown(wait, cancel_futures=cancel_futures)


def _start(alive: Connection, begin: Callable[[], None]) -> None:
    # A terminal or a cluster signals every process of a run, which then saves its end: it needs its workers for that.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    # There are as many workers as were asked for; a tokenizer's own threads in each would only crowd the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with, args=(alive,), daemon=True).start()
    begin()


def _end_with(alive: Connection) -> None:
    """Nothing is ever sent: the pipe is readable when its other end is closed."""
    alive.poll(None)
    os._exit(0)
