"""The engine's side of the server: calls from the routes to the engine, its adapters and its profiler.

All results are values that messages can carry, and all errors are HttpErrors, so that the routes may run in the same
process or in others.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from maxhydra.config.schema.decode import Pooling
from maxhydra.decode.grammar import GrammarError
from maxhydra.decode.openai_server.adapter_routes import AdapterRoutes, unknown_model
from maxhydra.decode.openai_server.fields import bad_field
from maxhydra.decode.openai_server.http11 import HttpError
from maxhydra.decode.request import Delta, Engine, Handle, Request, RequestRejectedError, UnknownAdapterError
from maxhydra.runtime.profiler import Profiler

# Methods that return at once.
FAST = ("stats", "check_health", "adapter_cards", "start_profile")


class ServedEngine(Engine, Protocol):
    """The decode engine."""

    def add_flush(self, flush: Callable[[], None]) -> None: ...

    def pool(self, rows: Sequence[Sequence[int]], pooling: Pooling) -> np.ndarray: ...


class Backend:
    """The engine and what belongs to it. Thread-safe; methods raise HttpError."""

    def __init__(
        self, engine: ServedEngine, *, adapters: AdapterRoutes | None = None, profiler: Profiler | None = None
    ):
        """`adapters`: None if requests cannot name adapters."""
        self._engine, self._adapters, self._profiler = engine, adapters, profiler
        self.add_flush = engine.add_flush
        self._failure: str | None = None

    def submit(self, requests: Sequence[Request], field: str) -> list[Handle]:
        """Queue the sequences of one HTTP request, whose prompt is in `field`; none if one is rejected."""
        handles: list[Handle] = []
        try:
            for request in requests:
                handles.append(self._engine.submit(request))
        except (GrammarError, RequestRejectedError) as error:
            for handle in handles:
                handle.cancel()
            raise self._rejection(error, requests[0], field) from None
        return handles

    def _rejection(self, error: Exception, request: Request, field: str) -> HttpError:
        if isinstance(error, GrammarError):
            return bad_field("response_format", f"is invalid: {error}")
        if isinstance(error, UnknownAdapterError):
            assert self._adapters is not None and request.adapter is not None
            return unknown_model(request.adapter, self._adapters.models)
        self.check_health()
        return bad_field(field, f"is invalid: {error}")

    def note_finish(self, delta: Delta) -> None:
        """The last sequence that finished and was not cancelled determines the health of the engine."""
        if delta.finish != "cancelled":
            self._failure = delta.error if delta.finish == "error" else None

    def call(self, method: str, arguments: Sequence[Any]) -> Any:
        """Call a method below by name."""
        assert method in (*FAST, "pool", "load_adapter", "unload_adapter")
        return getattr(self, method)(*arguments)

    def stats(self) -> dict[str, float]:
        return self._engine.stats()

    def check_health(self) -> None:
        """Raise HttpError if the engine has failed."""
        if self._failure is not None:
            raise HttpError(503, f"the engine failed: {self._failure}", code="engine_failed")

    def adapter_cards(self, card: dict[str, Any]) -> dict[str, dict[str, Any]]:
        return {} if self._adapters is None else self._adapters.cards(card)

    def load_adapter(self, body: bytes) -> str:
        assert self._adapters is not None
        return self._adapters.load(body)

    def unload_adapter(self, body: bytes) -> str:
        assert self._adapters is not None
        return self._adapters.unload(body)

    def start_profile(self) -> str | None:
        """Profile the next iterations of the engine; return the folder, None without a profiler."""
        if self._profiler is None:
            return None
        self._profiler.request()
        return str(self._profiler.folder)

    def pool(self, rows: Sequence[Sequence[int]], pooling: str) -> np.ndarray:
        """Pooled hidden states; see `decode.engine.Engine.pool`."""
        try:
            return self._engine.pool(rows, Pooling(pooling))
        except RequestRejectedError as error:
            raise HttpError(503, str(error), code="engine_failed") from None
