"""A process of the HTTP server: all of its work except that of the engine, to which a socket leads.

It parses and tokenizes requests, makes the text of their tokens, and encodes responses, on a listening socket that it
shares with the others. It ends when the engine's process does.
"""

import asyncio
import dataclasses
import itertools
import logging
import os
import socket
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from maxhydra.config.schema.decode import Pooling
from maxhydra.decode.openai_server.counters import Counters
from maxhydra.decode.openai_server.delta_queue import DeltaQueue
from maxhydra.decode.openai_server.encoder_settings import EncoderSettings
from maxhydra.decode.openai_server.engine_messages import (
    CALL,
    CANCEL,
    DELTAS,
    ERROR,
    READY,
    RESULT,
    START,
    STOP,
    SUBMIT,
    Message,
    Unpacker,
    decode_delta,
    decode_error,
    encode_requests,
    pack,
)
from maxhydra.decode.openai_server.routes import Service, ServiceSettings
from maxhydra.decode.openai_server.server import Limits, serve
from maxhydra.decode.request import Request
from maxhydra.record.log import logging_to
from maxhydra.record.processes import exit_with_parent, ignore_run_signals


@dataclasses.dataclass(frozen=True)
class HttpSettings:
    """What all processes of a server have in common."""

    prompts: EncoderSettings
    service: ServiceSettings
    limits: Limits


class RemoteClient(asyncio.Protocol):
    """The engine in another process. Deltas of a call of the engine arrive in one message."""

    def __init__(self) -> None:
        self.start, self.stop = asyncio.Event(), asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._unpacker = Unpacker()
        self._numbers, self._calls = itertools.count(), itertools.count(-1, -1)
        """Numbers of sequences, and of calls: results of submitted requests have the number of the first sequence."""
        self._results: dict[int, asyncio.Future[Any]] = {}
        self._queues: dict[int, tuple[DeltaQueue, int]] = {}
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        """Exit: without the engine, no request can be served."""
        os._exit(1)

    async def close(self) -> None:
        """Send all messages, and exit."""
        self._transport.close()
        await asyncio.Event().wait()

    def data_received(self, data: bytes) -> None:
        for kind, *content in self._unpacker.decode(data):
            self._receive(kind, content)

    def send(self, *message: Any) -> None:
        self._transport.write(pack(*message))

    async def submit(self, requests: Sequence[Request], queue: DeltaQueue, *, field: str) -> None:
        numbers = list(itertools.islice(self._numbers, len(requests)))
        self._queues |= {number: (queue, index) for index, number in enumerate(numbers)}
        queue.set_on_cancel(lambda: self.send(CANCEL, numbers))
        try:
            await self._send_and_wait(SUBMIT, numbers[0], field, encode_requests(requests))
        except BaseException:
            queue.discard()
            for number in numbers:
                self._queues.pop(number, None)
            raise

    async def call(self, method: str, *arguments: Any) -> Any:
        return await self._send_and_wait(CALL, next(self._calls), method, arguments)

    def pool(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray:
        call = self.call("pool", rows, pooling.value)
        pooled: np.ndarray = asyncio.run_coroutine_threadsafe(call, self._loop).result()
        return pooled

    async def _send_and_wait(self, kind: int, number: int, *content: Any) -> Any:
        result = self._results[number] = self._loop.create_future()
        try:
            self.send(kind, number, *content)
            return await result
        finally:
            del self._results[number]

    def _receive(self, kind: int, content: Message | list[Any]) -> None:
        if kind == DELTAS:
            for number, delta in map(decode_delta, content[0]):
                queue, index = self._queues.get(number, (None, 0))
                if delta.finish is not None:
                    self._queues.pop(number, None)
                if queue is not None:
                    queue.put(index, delta)
        elif kind == START:
            self.start.set()
        elif kind == STOP:
            self.start.set()
            self.stop.set()
        elif (result := self._results.get(content[0])) is not None and not result.done():
            assert kind in (RESULT, ERROR)
            if kind == RESULT:
                result.set_result(content[1])
            else:
                result.set_exception(decode_error(content[1]))


def run_http_process(pipe: socket.socket, listener: socket.socket, settings: HttpSettings, counters: Counters) -> None:
    """Main of the process: load the tokenizer, then serve until the engine's process sends a stop."""
    ignore_run_signals()
    exit_with_parent()
    # The devices belong to the engine's process.
    jax.config.update("jax_platforms", "cpu")
    # asyncio warns of every write to a client that has disconnected.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with logging_to(None, console=False):
        asyncio.run(_run(pipe, listener, settings, counters))
    # Threads may still wait for results of requests that were cancelled.
    os._exit(0)


async def _run(pipe: socket.socket, listener: socket.socket, settings: HttpSettings, counters: Counters) -> None:
    prompts, problem = settings.prompts.load()
    pipe.setblocking(False)
    _, client = await asyncio.get_running_loop().create_unix_connection(RemoteClient, sock=pipe)
    if prompts is None:
        client.send(READY, problem)
        return await client.close()
    service = Service(client, prompts, settings.service, counters)
    client.send(READY, "")
    await client.start.wait()
    await serve(listener, service, settings.limits, stop=client.stop)
    service.kill_parser()
