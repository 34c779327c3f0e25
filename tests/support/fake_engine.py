"""An engine without a model, for tests of its clients: known text, known speed, real threads.

Its completions are words that depend only on the prompt and the seed. One thread advances `slots` sequences by a token
per step, so that waiting, cancelling and closing behave as in the real engine.
"""

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path

from maxhydra.config import Config
from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.tasks.inference import DecodeTask
from maxhydra.decode.offline import BatchStats, OfflineBatch
from maxhydra.decode.offline_files import OutputFile, check_records
from maxhydra.decode.request import Delta, Handle, Request, RequestRejectedError, TokenLogprob
from maxhydra.decode.sampling_params import PromptClient, PromptEncoder

WORDS = ["alpha", "beta", "gamma", "delta", "epsilon", "zeta", "eta", "theta"]


def expected_text(request: Request) -> str:
    """Return the completion of a request."""
    start = (sum(request.prompt) + request.seed) % len(WORDS)
    return " ".join(WORDS[(start + n) % len(WORDS)] for n in range(request.max_tokens))


class FakeEngine:
    """Every word is a token. A stop string ends the completion before it."""

    def __init__(self, *, slots: int = 4, seconds: float = 0.0, max_context: int = 512):
        self.slots, self.seconds, self.max_context = slots, seconds, max_context
        self._waiting: deque[tuple[Request, Handle]] = deque()
        self._running: list[tuple[Request, Handle, int]] = []
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._written = self._read = 0
        self._failure, self._flushes = "", list[Callable[[], None]]()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Handle:
        if self._failure:
            raise RequestRejectedError(self._failure)
        if not request.prompt:
            raise RequestRejectedError("the prompt is empty")
        if len(request.prompt) >= self.max_context:
            reason = f"the prompt has {len(request.prompt)} tokens, over task.engine.max_context={self.max_context}"
            raise RequestRejectedError(reason)
        handle = Handle()
        with self._lock:
            self._waiting.append((request, handle))
        return handle

    def add_flush(self, flush: Callable[[], None]) -> None:
        self._flushes.append(flush)

    def _flush(self) -> None:
        for flush in self._flushes:
            flush()

    def stats(self) -> dict[str, float]:
        with self._lock:
            return {
                "running": len(self._running),
                "waiting": len(self._waiting),
                "tokens_written": self._written,
                "prompt_tokens_read": self._read,
            }

    def fail(self, reason: str) -> None:
        """End every sequence with an error, like an engine whose device failed."""
        self._failure = reason
        with self._lock:
            unfinished = [handle for _, handle, *_ in [*self._running, *self._waiting]]
            self._running, self._waiting = [], deque()
        for handle in unfinished:
            handle.put(Delta("", (), finish="error", error=reason))
        self._flush()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._closed.is_set():
            with self._lock:
                while self._waiting and len(self._running) < self.slots:
                    request, handle = self._waiting.popleft()
                    self._read += len(request.prompt)
                    self._running.append((request, handle, 0))
                running = self._running
            time.sleep(self.seconds if running and self.seconds else 0.0005)
            after = [self._step(*sequence) for sequence in running]
            self._flush()
            with self._lock:
                if self._running is running:
                    self._running = [sequence for sequence in after if sequence is not None]
        for _, handle, *_ in [*self._running, *self._waiting]:
            handle.put(Delta("", (), finish="cancelled"))
        self._flush()

    def _step(self, request: Request, handle: Handle, done: int) -> tuple[Request, Handle, int] | None:
        if handle.is_cancelled:
            handle.put(Delta("", (), finish="cancelled"))
            return None
        text = expected_text(request)
        words = text.split(" ")
        before, now = " ".join(words[:done]), " ".join(words[: done + 1])
        stops = [index for stop in request.stop if (index := now.find(stop)) >= 0]
        piece = now[len(before) : min(stops)] if stops else now[len(before) :]
        token = WORDS.index(words[done])
        logprobs: tuple[TokenLogprob, ...] = ()
        if request.logprobs is not None:
            others = tuple((n, -1.0 - n) for n in range(request.logprobs))
            logprobs = (TokenLogprob(token, -0.5, others),)
        scores: tuple[TokenLogprob, ...] = ()
        if request.prompt_logprobs is not None and done == 0:
            scores = tuple(TokenLogprob(each, -0.25, ((each, -0.25),)) for each in request.prompt[1:])
        self._written += 1
        finish = "stop" if stops else "length" if done + 1 == request.max_tokens else None
        handle.put(Delta(piece, (token,), logprobs, finish, prompt_logprobs=scores))
        return None if finish else (request, handle, done + 1)


@cache
def compose_decode(*overrides: str) -> Config:
    return compose(["task=decode", *overrides]).config


def make_client(engine: FakeEngine, *overrides: str) -> PromptClient:
    """Return a client of the fake engine, with the settings of a command."""
    config = compose_decode(*overrides)
    assert isinstance(config.task, DecodeTask)
    prompts = PromptEncoder(config.data, vocab_size=config.model.vocab_size)
    return PromptClient(engine, prompts, config.task, config.run.seed)


def decode_file(source: Path, target: Path, *overrides: str, seconds: float = 0.0) -> BatchStats:
    """Run task=decode on a file, without a model."""
    engine = FakeEngine(seconds=seconds)
    client = make_client(engine, "task.input=in", "task.output=out", "task.progress=none", *overrides)
    task = dataclasses.replace(client.task, input=str(source), output=str(target))
    try:
        records = check_records(source, task.sampling)
        with OutputFile(target, settings="fake") as output:
            return OfflineBatch(dataclasses.replace(client, task=task), output, records=records).run()
    finally:
        engine.close()
