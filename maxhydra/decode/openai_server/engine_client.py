"""The interface of the engine for the routes, and its implementation for an engine in the same process."""

import asyncio
import contextlib
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from maxhydra.config.schema.decode import Pooling
from maxhydra.decode.openai_server.backend import FAST, Backend
from maxhydra.decode.openai_server.delta_queue import DeltaQueue
from maxhydra.decode.request import Delta, Handle, Request


class EngineClient(Protocol):
    """An engine, in this process or in another one. Used in the event loop, except `pool`."""

    async def submit(self, requests: Sequence[Request], queue: DeltaQueue, *, field: str) -> None:
        """Queue sequences whose deltas go to `queue`; HttpError if one is rejected. `field`: of the prompt."""
        ...

    async def call(self, method: str, *arguments: Any) -> Any:
        """The result of a method of `Backend`."""
        ...

    def pool(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        """Pooled hidden states of token sequences; called in another thread than that of the event loop."""
        ...


class LocalClient:
    """An engine in the same process, whose deltas wake the event loop once per call of the engine."""

    def __init__(self, backend: Backend):
        self._backend = backend
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deltas: deque[tuple[DeltaQueue, int, Delta]] = deque()
        self._is_scheduled = False
        backend.add_flush(self._flush)

    async def submit(self, requests: Sequence[Request], queue: DeltaQueue, *, field: str) -> None:
        self._loop = asyncio.get_running_loop()
        submit = partial(self._submit, requests, queue, field)
        # Compiling a grammar may take a second.
        await asyncio.to_thread(submit) if requests[0].grammar else submit()
        self._flush()

    def _submit(self, requests: Sequence[Request], queue: DeltaQueue, field: str) -> None:
        handles = self._backend.submit(requests, field)
        for index, handle in enumerate(handles):
            handle.listen(partial(self._post, queue, index))
        queue.set_on_cancel(partial(_cancel, handles))

    async def call(self, method: str, *arguments: Any) -> Any:
        call = partial(self._backend.call, method, arguments)
        return call() if method in FAST else await asyncio.to_thread(call)

    def pool(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        pooled: np.ndarray = self._backend.pool(rows, pooling.value)
        return pooled

    def _post(self, queue: DeltaQueue, index: int, delta: Delta) -> None:
        """Called in the engine's thread."""
        if delta.finish is not None:
            self._backend.note_finish(delta)
        self._deltas.append((queue, index, delta))

    def _flush(self) -> None:
        if self._deltas and not self._is_scheduled:
            self._is_scheduled = True
            assert self._loop is not None
            # The event loop is closed at shutdown, when no client is left.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        # Reset first: deltas that are posted from now on schedule another delivery.
        self._is_scheduled = False
        while self._deltas:
            queue, index, delta = self._deltas.popleft()
            queue.put(index, delta)


def _cancel(handles: Sequence[Handle]) -> None:
    for handle in handles:
        handle.cancel()
