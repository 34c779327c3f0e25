"""A server over a given engine, in a thread or in separate processes, and its clients."""

import asyncio
import contextlib
import json
import socket
import threading
import time
from pathlib import Path
from typing import Any

from maxhydra.config.schema.decode import Pooling, Sampling
from maxhydra.config.schema.health import Profile
from maxhydra.decode.openai_server import (
    Access,
    AdapterRoutes,
    Backend,
    EncoderSettings,
    HttpSettings,
    Limits,
    LocalClient,
    ProcessManager,
    ServerDefaults,
    Service,
    ServiceSettings,
    listen,
    serve,
)
from maxhydra.decode.sampling_params import PromptEncoder
from maxhydra.runtime.profiler import Profiler
from tests.support.skips import import_optional

openai = import_optional("openai", extra="test")

LIMITS = {"max_body": 2**20, "max_connections": 200, "timeout": 60.0, "keep_alive": 5.0, "drain": 5.0}


class RunningServer:
    """A server in a thread, with clients. `processes`: of HTTP; 0: it runs in the thread."""

    def __init__(
        self,
        engine: Any,
        prompts: PromptEncoder,
        *,
        key: str | None = None,
        max_sequences: int = 200,
        processes: int = 0,
        adapters: AdapterRoutes | None = None,
        defaults: ServerDefaults | None = None,
        pooling: Pooling | None = None,
        encoder: EncoderSettings | None = None,
        waits: bool = True,
        **limits: Any,
    ):
        self.engine, self.listener = engine, listen("127.0.0.1", 0)
        self.port = self.listener.getsockname()[1]
        self.profiler = Profiler(Profile(), Path("outputs/it"))
        backend = Backend(engine, adapters=adapters, profiler=self.profiler)
        defaults = defaults or ServerDefaults("tiny", Sampling(max_tokens=4), 8, 320, engine.max_context)  # type: ignore[call-arg]
        access, is_live = Access(key, is_local=True), adapters is not None
        service = ServiceSettings(defaults, access, max_sequences, 0, has_live_adapters=is_live, pooling=pooling)
        settings = HttpSettings(encoder or EncoderSettings.of(prompts), service, Limits(**{**LIMITS, **limits}))
        ready = threading.Event()
        self.manager = ProcessManager(processes, self.listener, settings) if processes else None
        self.service: Service

        async def main() -> None:
            self.loop, self.stop = asyncio.get_running_loop(), asyncio.Event()
            if self.manager:
                return await self.manager.run(backend, stop=self.stop, on_serving=ready.set)
            self.service = Service(LocalClient(backend), prompts, settings.service)
            await serve(self.listener, self.service, settings.limits, stop=self.stop, on_serving=ready.set)

        self.failure: Exception | None = None

        def run() -> None:
            try:
                asyncio.run(main())
            except RuntimeError as error:
                self.failure = error

        self.thread = threading.Thread(target=run)
        self.thread.start()
        assert not waits or ready.wait(240)

    def client(self, key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=240)

    def raw(self, data: bytes, *, until_closed: bool = True) -> bytes:
        """Send bytes, and read until the server closes the connection or sends nothing more."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=240) as connection:
            with contextlib.suppress(ConnectionError):
                connection.sendall(data)
            received = b""
            with contextlib.suppress(ConnectionError, TimeoutError):
                while part := connection.recv(65536):
                    received += part
                    if not until_closed and b"\r\n\r\n" in received:
                        break
            return received

    def post(self, body: bytes | dict[str, Any], path: str = "/v1/chat/completions") -> tuple[int, dict[str, Any]]:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n"
        return parse_response(self.raw(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data))

    def get(self, path: str) -> bytes:
        return self.raw(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())

    def idle(self, seconds: float = 240) -> bool:
        """Return True if every slot becomes free in time."""
        return eventually(lambda: self.engine.stats()["running"] + self.engine.stats()["waiting"] == 0, seconds)

    def end(self, *, closes_engine: bool = True) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed if the server has failed
            self.loop.call_soon_threadsafe(self.stop.set)
        self.thread.join(240)
        assert not self.thread.is_alive()
        (self.manager or self.service).close()
        if closes_engine:
            self.engine.close()


def parse_response(data: bytes) -> tuple[int, dict[str, Any]]:
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def eventually(happens: Any, seconds: float = 240) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if happens():
            return True
        time.sleep(0.01)
    return bool(happens())
