"""What is asked of the engine, and what comes back: the whole interface of everything that decodes."""

import dataclasses
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True)
class Request:
    """One sequence to decode. Several samples of one prompt are several requests with different seeds."""

    prompt: tuple[int, ...]
    """Token ids, at least one."""
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    seed: int
    stop: tuple[str, ...]
    ignore_eos: bool
    logprobs: int | None = None
    """Alternatives to report beside each token's own log-probability; None reports neither."""


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token's log-probability under the model (before temperature and filters), and the likeliest alternatives."""

    token: int
    logprob: float
    alternatives: tuple[tuple[int, float], ...]


@dataclasses.dataclass(frozen=True)
class Delta:
    """News of a sequence: text that can no longer change, the tokens behind it, and how it ended, if it did."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: str | None = None
    """stop: an end token or a stop text; length: max_tokens or the context; cancelled; error."""
    error: str = ""


@dataclasses.dataclass(frozen=True)
class Completion:
    """A finished sequence. `text` has no stop text; `tokens` are all that were drawn, end token included."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish: str
    error: str = ""

    @classmethod
    def of(cls, deltas: Sequence[Delta]) -> "Completion":
        """All the deltas of a sequence as one."""
        return cls(
            text="".join(delta.text for delta in deltas),
            tokens=tuple(token for delta in deltas for token in delta.tokens),
            logprobs=tuple(logprob for delta in deltas for logprob in delta.logprobs),
            finish=deltas[-1].finish or "",
            error=deltas[-1].error,
        )


class Handle:
    """A sequence under way. Iterate for deltas as they come, or take the whole result; any thread may cancel."""

    def __init__(self) -> None:
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._listener: Callable[[Delta], None] | None = None
        self._lock = threading.Lock()
        self.is_cancelled = False

    def put(self, delta: Delta) -> None:
        """The engine's side."""
        with self._lock:
            (self._listener or self._deltas.put)(delta)

    def listen(self, listener: Callable[[Delta], None]) -> None:
        """Have every delta given to a function instead, those that are here already at once: one thread can then wait
        for many sequences. It is called in the engine's thread, so it must return at once and not raise."""
        with self._lock:
            while not self._deltas.empty():
                listener(self._deltas.get())
            self._listener = listener

    def cancel(self) -> None:
        """Give the sequence up; its place is free at the engine's next step."""
        self.is_cancelled = True

    def __iter__(self) -> Iterator[Delta]:
        while True:
            delta = self._deltas.get()
            yield delta
            if delta.finish is not None:
                return

    def result(self) -> Completion:
        """Wait for the end."""
        return Completion.of(list(self))


class RefusedError(ValueError):
    """A request that the engine cannot serve, with the reason and the setting that would change it."""


class Engine(Protocol):
    """Decodes many sequences at once, each exactly as if it were alone."""

    def submit(self, request: Request) -> Handle:
        """Queue a request; RefusedError at once if it can never be served. Any thread may call."""
        ...

    def stats(self) -> dict[str, float]:
        """Sequences running and waiting, pages in use and cached, tokens written and prompt tokens read so far."""
        ...

    def close(self) -> None:
        """End the engine's thread; sequences under way end as cancelled."""
        ...
