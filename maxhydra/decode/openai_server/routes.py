"""What each path does: asks the engine on behalf of a client, within the places there are, and tells what it says."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from maxhydra.config import ConfigError
from maxhydra.decode.openai_server.auth import Access
from maxhydra.decode.openai_server.http11 import RETRY, Connection, HttpError, RequestHead
from maxhydra.decode.openai_server.request_schema import CompletionRequest, ServerDefaults, parse, wrong
from maxhydra.decode.openai_server.response_schema import ResponseBuilder
from maxhydra.decode.prompts import PromptEncoder, PromptError
from maxhydra.decode.request import Completion, Delta, Engine, Handle, RefusedError
from maxhydra.decode.sampling_params import make_requests

T = TypeVar("T")
# Threads for JSON and tokenizers, which would stop every stream if they ran in the event loop.
THREADS = 2


class Service:
    """The paths over one engine. Lives in one event loop; the engine's thread only leaves news in it."""

    def __init__(
        self, engine: Engine, prompts: PromptEncoder, offer: ServerDefaults, *, access: Access, places: int, seed: int
    ):
        self._engine, self._prompts, self._offer = engine, prompts, offer
        self._access, self._places, self._seed = access, places, seed
        self._taken = self._numbers = 0
        self._failure: str | None = None
        self._statuses: dict[int, int] = {}
        self._pool = ThreadPoolExecutor(THREADS, "tokenize")
        self._created = int(time.time())
        self._paths: dict[str, tuple[str, Callable[[RequestHead, bytes, Connection], Coroutine[Any, Any, None]]]] = {
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/completions": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            f"/v1/models/{offer.model}": ("GET", self._models),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
        }

    def admit(self, head: RequestHead) -> None:
        """Refuse what can be refused before the body is read."""
        self._access.check(head)
        if head.path not in self._paths:
            raise HttpError(404, f"nothing is at {head.path[:200]}; accepted: {', '.join(self._paths)}")
        method = self._paths[head.path][0]
        if head.method != method:
            raise HttpError(405, f"{head.path} takes {method}", headers={"Allow": method})

    def count(self, status: int) -> None:
        self._statuses[status] = self._statuses.get(status, 0) + 1

    async def answer(self, head: RequestHead, body: bytes, link: Connection) -> None:
        await self._paths[head.path][1](head, body, link)
        self.count(200)

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    async def _health(self, head: RequestHead, body: bytes, link: Connection) -> None:
        self._require_engine()
        await link.send_json(200, {"status": "ok"}, headers={})

    async def _models(self, head: RequestHead, body: bytes, link: Connection) -> None:
        name = self._offer.model
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "maxhydra"}
        is_one = head.path.endswith(f"/{name}")
        await link.send_json(200, card if is_one else {"object": "list", "data": [card]}, headers={})

    async def _metrics(self, head: RequestHead, body: bytes, link: Connection) -> None:
        """Plain numbers, a line each, as Prometheus reads them."""
        numbers = {f"engine_{name}": value for name, value in self._engine.stats().items()}
        numbers |= {"server_sequences": self._taken, "server_sequences_limit": self._places}
        lines = [f"maxhydra_{name} {value:.15g}" for name, value in numbers.items()]
        lines += [f'maxhydra_server_responses{{status="{code}"}} {n}' for code, n in sorted(self._statuses.items())]
        text = "".join(f"{line}\n" for line in lines).encode()
        await link.send(200, text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _complete(self, head: RequestHead, body: bytes, link: Connection) -> None:
        is_chat = head.path.endswith("/chat/completions")
        asked = await self._aside(lambda: parse(body, self._offer, is_chat=is_chat))
        count = asked.sequences
        if self._taken + count > self._places:
            reason = f"{self._taken} sequences are under way or wait, and task.queue allows no more; try again later"
            raise HttpError(429, reason, code="queue_full", headers=RETRY)
        self._taken += count
        news = _DeltaQueue(self._ended)
        try:
            prompts = await self._aside(lambda: self._encode(asked))
            self._submit(asked, prompts, news)
        finally:
            self._taken -= count - len(news.handles)
        reply = ResponseBuilder(
            is_chat=is_chat,
            model=self._offer.model,
            prompts=self._prompts,
            prompt_tokens=sum(map(len, prompts)),
            has_logprobs=asked.logprobs is not None,
            include_usage=asked.include_usage,
        )
        try:
            await (self._stream(head, link, news, reply) if asked.stream else self._whole(link, news, reply))
        finally:
            # A client that hung up gives its places back; to what has ended this is nothing.
            news.cancel()

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    def _encode(self, asked: CompletionRequest) -> list[list[int]]:
        """In a thread of the pool."""
        try:
            if asked.is_chat:
                return [self._prompts.of_messages(asked.messages)]
            return [self._prompts.of_text(each) if isinstance(each, str) else each for each in asked.prompts]
        except PromptError as error:
            raise wrong("messages" if asked.is_chat else "prompt", f"cannot be used: {error}") from None
        except ConfigError as error:
            raise wrong("messages", f"cannot be used: {error.problems[0]}") from None

    def _submit(self, asked: CompletionRequest, prompts: Sequence[list[int]], news: "_DeltaQueue") -> None:
        for prompt in prompts:
            number, self._numbers = self._numbers, self._numbers + 1
            requests = make_requests(
                prompt,
                asked.sampling,
                samples=asked.samples,
                seed=self._seed,
                number=number,
                logprobs=asked.logprobs,
            )
            for request in requests:
                try:
                    news.add(self._engine.submit(request))
                except RefusedError as error:
                    news.cancel()
                    self._require_engine()
                    raise wrong("messages" if asked.is_chat else "prompt", f"cannot be used: {error}") from None

    def _ended(self, delta: Delta) -> None:
        """A sequence has ended: the last that ended by itself says whether the engine is well."""
        self._taken -= 1
        if delta.finish != "cancelled":
            self._failure = delta.error if delta.finish == "error" else None

    def _require_engine(self) -> None:
        if self._failure is not None:
            raise HttpError(503, f"the engine failed: {self._failure}", code="engine_failed")

    async def _whole(self, link: Connection, news: "_DeltaQueue", reply: ResponseBuilder) -> None:
        deltas: list[list[Delta]] = [[] for _ in news.handles]
        while news.left:
            for index, delta in await news.take():
                _refuse_failure(delta)
                deltas[index].append(delta)
        # With log-probabilities it asks the tokenizer for every alternative of every token.
        value = await self._aside(lambda: reply.whole([Completion.of(each) for each in deltas]))
        await link.send_json(200, value, headers={})

    async def _stream(self, head: RequestHead, link: Connection, news: "_DeltaQueue", reply: ResponseBuilder) -> None:
        await link.begin_events(head)
        openings = [reply.opening(index) for index in range(len(news.handles))]
        await link.send_events([chunk for chunk in openings if chunk is not None])
        sent, written = [0] * len(news.handles), 0
        while news.left:
            events = []
            for index, delta in await news.take():
                try:
                    _refuse_failure(delta)
                except HttpError as error:
                    # The status is out already; the stream ends without its end mark.
                    await link.send_events([error.body()])
                    await link.end_events()
                    return
                if delta.text or delta.finish or delta.logprobs:
                    events.append(reply.chunk(index, delta, sent[index]))
                sent[index] += len(delta.text)
                written += len(delta.tokens)
            await link.send_events(events)
        await link.send_events(reply.closing(written))
        await link.end_events()


class _DeltaQueue:
    """The deltas of all sequences of one request, brought from the engine's thread into the event loop."""

    def __init__(self, ended: Callable[[Delta], None]):
        self.handles: list[Handle] = []
        self.left = 0
        """Sequences whose end was not taken yet."""
        self._ended = ended
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()

    def add(self, handle: Handle) -> None:
        index = len(self.handles)
        self.handles.append(handle)
        self.left += 1

        def listener(delta: Delta) -> None:
            # Where the loop has ended, so has whoever would have read it.
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._note, index, delta)

        handle.listen(listener)

    def _note(self, index: int, delta: Delta) -> None:
        self._queue.put_nowait((index, delta))
        if delta.finish is not None:
            self._ended(delta)

    async def take(self) -> list[tuple[int, Delta]]:
        """All that has come, at least one."""
        found = [await self._queue.get()]
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        self.left -= sum(delta.finish is not None for _, delta in found)
        return found

    def cancel(self) -> None:
        for handle in self.handles:
            handle.cancel()


def _refuse_failure(delta: Delta) -> None:
    if delta.finish == "cancelled":
        raise HttpError(503, "the server is ending", code="cancelled", headers=RETRY)
    if delta.finish == "error":
        raise HttpError(500, f"the engine failed: {delta.error}", code="engine_failed")
