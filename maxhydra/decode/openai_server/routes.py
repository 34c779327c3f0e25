"""The routes: check access, submit completions to the engine within the queue limit, send or stream the results."""

import asyncio
import dataclasses
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from importlib import resources
from typing import Any, TypeVar
from urllib.parse import unquote

from maxhydra.config.schema.decode import Pooling
from maxhydra.decode.openai_server.access import Access
from maxhydra.decode.openai_server.adapter_routes import LOAD_ADAPTER, UNLOAD_ADAPTER, unknown_model
from maxhydra.decode.openai_server.chat_turns import ChatTurns
from maxhydra.decode.openai_server.counters import FINISHES, PROMPTS, STATUSES, Counters
from maxhydra.decode.openai_server.delta_queue import DeltaQueue
from maxhydra.decode.openai_server.engine_client import EngineClient
from maxhydra.decode.openai_server.http11 import JSON_TYPE, RETRY, Connection, HttpError, RequestHead, dump_slices
from maxhydra.decode.openai_server.metrics import format_metrics
from maxhydra.decode.openai_server.parser_process import ParserProcess
from maxhydra.decode.openai_server.pooling_routes import EMBEDDINGS, SCORE, PoolingRoutes
from maxhydra.decode.openai_server.request_schema import (
    CompletionRequest,
    ServerDefaults,
    encode_prompts,
    insert_media,
    parse,
)
from maxhydra.decode.openai_server.response_schema import ResponseBuilder, echo_prompt
from maxhydra.decode.openai_server.responses_api import to_chat_request, to_response
from maxhydra.decode.openai_server.responses_stream import ResponseStream
from maxhydra.decode.openai_server.tokenize import detokenize, tokenize
from maxhydra.decode.request import Completion, Delta, Request
from maxhydra.decode.sampling_params import MediaPrompt, PromptEncoder, make_requests

T = TypeVar("T")
Route = Callable[[RequestHead, bytes, Connection, ExitStack], Coroutine[Any, Any, None]]
# The chat page. It is one file, and may only talk to this server.
CHAT_PAGE = resources.files(__package__).joinpath("web/chat.html").read_bytes()
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:"
PAGE_HEADERS = {
    "Content-Type": "text/html; charset=utf-8",
    "Content-Security-Policy": f"{POLICY}; frame-ancestors 'none'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}
# Threads for JSON and tokenizers, which would stall every stream if they ran in the event loop.
THREADS = 2
# A larger body is parsed in a process: it may take seconds to tokenize, and waits for other large ones only.
LARGE_BODY = 32 * 1024
# A body of this size is parsed in the event loop: that takes less time than to wait for a thread.
SMALL_BODY = 4 * 1024
# A body of this size is also tokenized there, which takes less than 0.1 ms.
TINY_BODY = 1024
# Prefix of the paths of single models.
CARDS = "/v1/models/"


def is_large(head: RequestHead) -> bool:
    """Whether the body is parsed by the parser process."""
    return head.length > LARGE_BODY


@dataclasses.dataclass(frozen=True)
class ServiceSettings:
    """Settings of the routes."""

    defaults: ServerDefaults
    access: Access
    max_sequences: int
    """Running and queued sequences; further requests get status 429."""
    seed: int
    has_live_adapters: bool = False
    """Whether clients may load and unload adapters."""
    pooling: Pooling | None = None
    """Of embeddings; None: there are none."""
    is_reward_model: bool = False
    """Scores are the only route."""


class Service:
    """The routes over one engine, in one event loop."""

    def __init__(
        self, engine: EngineClient, prompts: PromptEncoder, settings: ServiceSettings, counters: Counters | None = None
    ):
        """`counters`: shared with the other processes of the server, if there are any."""
        self._engine, self._prompts, self._settings = engine, prompts, settings
        self._defaults, self._access = settings.defaults, settings.access
        self.counters = counters or Counters()
        self._pool, self._logprobs_pool = ThreadPoolExecutor(THREADS, "server"), ThreadPoolExecutor(THREADS, "logprobs")
        self._pooling_pool = ThreadPoolExecutor(1, "pooling")
        self._parser = ParserProcess(prompts, settings.defaults, self.counters)
        self._turns = ChatTurns(prompts)
        # Computed once, and before the first request, which would wait for it.
        _ = prompts.tokenizer.max_token_bytes
        self._created = int(time.time())
        self._paths: dict[str, tuple[str, Route]] = {
            "/v1/chat/completions": ("POST", self._complete),
            "/v1/completions": ("POST", self._complete),
            "/v1/responses": ("POST", self._complete),
            "/v1/models": ("GET", self._models),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._tokenize),
            f"/v1/models/{settings.defaults.model}": ("GET", self._models),
            "/": ("GET", self._page),
            "/health": ("GET", self._health),
            "/metrics": ("GET", self._metrics),
            "/profile": ("POST", self._profile),
        }
        self._pooling: PoolingRoutes | None = None
        if settings.pooling is not None:
            arguments = engine, prompts, settings.defaults, settings.pooling, settings.is_reward_model
            self._pooling = PoolingRoutes(*arguments)
            self._paths |= dict.fromkeys((EMBEDDINGS, SCORE), ("POST", self._pool_texts))
        if settings.is_reward_model:
            removed = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/", EMBEDDINGS)
            self._paths = {path: route for path, route in self._paths.items() if path not in removed}
        if settings.has_live_adapters:
            self._paths |= dict.fromkeys((LOAD_ADAPTER, UNLOAD_ADAPTER), ("POST", self._change_adapters))

    def admit(self, head: RequestHead) -> None:
        """Raise HttpError for requests that can be rejected before the body is read."""
        self._access.check(head)
        if (route := self._find_route(head.path)) is None:
            raise HttpError(404, f"unknown path {head.path[:200]}; accepted: {', '.join(self._paths)}")
        method = route[0]
        if head.method != method:
            raise HttpError(405, f"{head.path} only supports {method}", headers={"Allow": method})

    def admit_body(self, head: RequestHead, pending: ExitStack) -> None:
        """Count a large body until `pending` is closed; HttpError if too many are being read or parsed."""
        if is_large(head):
            self._parser.reserve(head.length)
            pending.callback(self._parser.release, head.length)

    def count(self, status: int) -> None:
        self.counters.add(status)

    async def handle(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        """Serve a request; `pending` is closed once its body is parsed."""
        route = self._find_route(head.path)
        assert route is not None
        await route[1](head, body, connection, pending)
        self.count(200)

    def _find_route(self, path: str) -> tuple[str, Route] | None:
        """Method and handler of a path; the cards of adapters have paths too."""
        is_card = self._defaults.has_adapters and path.startswith(CARDS)
        return self._paths.get(path) or (("GET", self._models) if is_card else None)

    def close(self) -> None:
        self._parser.close()
        self._pool.shutdown(cancel_futures=True)
        self._logprobs_pool.shutdown(cancel_futures=True)
        self._pooling_pool.shutdown(cancel_futures=True)

    def kill_parser(self) -> None:
        """End the process that parses large bodies, before this one exits."""
        self._parser.close()

    async def _health(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        await self._engine.call("check_health")
        await connection.send_json(200, {"status": "ok"}, headers={})

    async def _profile(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        """Profile the next iterations of the engine; only for clients on this machine."""
        folder = await self._engine.call("start_profile") if connection.is_local else None
        if folder is None:
            raise HttpError(403, "profiles can only be requested from the machine of the server")
        await connection.send_json(202, {"status": "requested", "folder": folder}, headers={})

    async def _models(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        name = self._defaults.model
        card = {"object": "model", "created": self._created, "owned_by": "maxhydra"}
        cards = {name: {"id": name, **card}}
        if self._defaults.has_adapters:
            cards |= await self._engine.call("adapter_cards", card)
        if not head.path.startswith(CARDS):
            return await connection.send_json(200, {"object": "list", "data": list(cards.values())}, headers={})
        named = head.path.removeprefix(CARDS)
        if named not in cards and (named := unquote(named)) not in cards:
            raise unknown_model(named, list(cards))
        await connection.send_json(200, cards[named], headers={})

    async def _change_adapters(
        self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack
    ) -> None:
        """Load or unload an adapter."""
        method = "load_adapter" if head.path == LOAD_ADAPTER else "unload_adapter"
        message = await self._engine.call(method, body)
        await connection.send_json(200, {"message": message}, headers={})

    async def _page(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        await connection.send(200, CHAT_PAGE, headers=PAGE_HEADERS)

    async def _tokenize(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        convert = tokenize if head.path == "/tokenize" else detokenize
        value = await self._in_thread(lambda: convert(body, self._prompts, self._defaults))
        await connection.send_json(200, value, headers={})

    async def _pool_texts(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        """Embed or score texts, in a thread that waits for the engine."""
        assert self._pooling is not None
        self._reserve("pooling", 1, "requests wait for embeddings")
        try:
            work = partial(self._pooling.respond, head.path, body)
            response = await asyncio.get_running_loop().run_in_executor(self._pooling_pool, work)
        finally:
            self.counters.add("pooling", -1)
        await connection.send_json(200, response, headers={})

    async def _metrics(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        """Send counters in the Prometheus text format."""
        counters, limit = self.counters, self._settings.max_sequences
        queue = {"sequences": counters.total("sequences"), "sequences_limit": limit}
        queue |= {"processes": 0 if counters.is_local else counters.num_rows}
        statuses, finishes = counters.totals(STATUSES), counters.totals(FINISHES)
        stats = await self._engine.call("stats")
        text = format_metrics(stats, queue, statuses, finishes, model=self._defaults.model).encode()
        await connection.send(200, text, headers={"Content-Type": "text/plain; version=0.0.4"})

    async def _complete(self, head: RequestHead, body: bytes, connection: Connection, pending: ExitStack) -> None:
        is_response = head.path == "/v1/responses"
        if is_response:
            body = await self._in_thread(lambda: to_chat_request(body))
        is_chat = is_response or head.path.endswith("/chat/completions")
        if is_large(head) and not is_response:
            request = await self._parser.parse(body, is_chat=is_chat)
        elif len(body) > SMALL_BODY:
            request = await self._in_thread(lambda: parse(body, self._defaults, is_chat=is_chat))
        else:
            request = parse(body, self._defaults, is_chat=is_chat)
        pending.close()
        queue, prompts = await self._submit(request, len(body))
        builder = ResponseBuilder(
            is_chat=is_chat,
            model=request.adapter or self._defaults.model,
            prompts=self._prompts,
            prompt_tokens=sum(map(len, prompts)),
            has_logprobs=request.logprobs is not None,
            include_usage=request.include_usage,
            has_prompts=request.echo,
            parsers=self._turns.parsers(request, prompts),
            max_calls=request.max_calls,
        )
        if request.echo:
            queue.change_first = lambda index, delta: echo_prompt(
                delta, request, self._prompts, index // request.samples, prompts[index // request.samples]
            )
        try:
            await (
                self._send_stream(head, connection, queue, ResponseStream(builder) if is_response else builder)
                if request.stream
                else self._send_complete(connection, queue, builder, to_response if is_response else None)
            )
        finally:
            # Frees the slots of a client that disconnected; finished sequences are not affected.
            queue.cancel()

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def _submit(self, request: CompletionRequest, size: int) -> tuple[DeltaQueue, list[list[int]]]:
        """Submit the sequences of a request within the queue limit; also return its prompts as token ids."""
        self._reserve("sequences", request.sequences, "sequences are running or queued, the limit of task.queue")
        queue: DeltaQueue | None = None
        try:
            prompts, media = await self._encode(request, size)
            engine_requests = self._engine_requests(request, prompts, media)
            queue = DeltaQueue(engine_requests, self._prompts.tokenizer, self._on_finish)
            await self._engine.submit(engine_requests, queue, field="messages" if request.is_chat else "prompt")
        except BaseException:
            # Also if the client disconnects meanwhile.
            num_finished = queue.discard() if queue is not None else 0
            self.counters.add("sequences", num_finished - request.sequences)
            raise
        return queue, prompts

    def _reserve(self, name: str, count: int, description: str) -> None:
        """Count running work; HttpError with status 429 if that exceeds the limit."""
        total = self.counters.add(name, count)
        if total > self._settings.max_sequences:
            self.counters.add(name, -count)
            reason = f"{total - count} {description}; retry later"
            raise HttpError(429, reason, code="queue_full", headers=RETRY)

    async def _encode(self, request: CompletionRequest, size: int) -> tuple[list[list[int]], MediaPrompt | None]:
        """Token ids of the prompts, with those of images and audio clips; `size`: bytes of the body."""
        encode = partial(encode_prompts, request, self._prompts, self._defaults.max_context)
        prompts = encode() if size <= TINY_BODY else await self._in_thread(encode)
        if not (request.images or request.audios):
            return prompts, None
        # Decoding an image may take a second.
        media = await self._in_thread(partial(insert_media, request, prompts, self._prompts))
        return [media.prompt], media

    def _engine_requests(
        self, request: CompletionRequest, prompts: list[list[int]], media: MediaPrompt | None
    ) -> list[Request]:
        """Requests of the engine for all samples of all prompts, whose text is made here."""
        return [
            engine_request
            for prompt in prompts
            for engine_request in make_requests(
                prompt,
                request.sampling,
                samples=request.samples,
                seed=self._settings.seed,
                number=self._next_prompt_number(),
                logprobs=request.logprobs,
                stream=request.stream,
                adapter=request.adapter,
                logit_bias=tuple((token, value) for token, value in request.logit_bias),
                grammar=request.grammar,
                detokenize=False,
                names_special=self._turns.has_parts(request),
                prompt_logprobs=request.logprobs if request.echo else None,
                images=None if media is None else media.images,
                audio=None if media is None else media.audio,
            )
        ]

    def _next_prompt_number(self) -> int:
        """A number that no other process uses, nor the one that this process has replaced."""
        counters = self.counters
        number = counters.row + counters.num_rows * counters.own(PROMPTS)
        counters.add(PROMPTS)
        return number

    def _on_finish(self, delta: Delta) -> None:
        """Count a finished sequence."""
        self.counters.add("sequences", -1)
        self.counters.add(delta.finish or "error")

    async def _send_complete(
        self,
        connection: Connection,
        queue: DeltaQueue,
        builder: ResponseBuilder,
        convert: Callable[[dict[str, Any]], dict[str, Any]] | None,
    ) -> None:
        """Send the complete response, `convert`ed to that of another API."""
        deltas: list[list[Delta]] = [[] for _ in range(queue.size)]
        while queue.num_unfinished:
            for index, delta in await queue.take():
                _raise_failure(delta)
                deltas[index].append(delta)

        def make_response() -> dict[str, Any]:
            response = builder.response([Completion.from_deltas(each) for each in deltas])
            return convert(response) if convert else response

        if not builder.has_logprobs:
            return await connection.send_json(200, make_response(), headers={})
        # In a thread: log-probabilities call the tokenizer for every alternative of every token. No other request
        # waits for a thread that does.
        loop = asyncio.get_running_loop()
        body = await loop.run_in_executor(self._logprobs_pool, lambda: dump_slices(make_response()))
        await connection.send(200, body, headers=JSON_TYPE)

    async def _send_stream(
        self, head: RequestHead, connection: Connection, queue: DeltaQueue, builder: ResponseBuilder | ResponseStream
    ) -> None:
        await connection.start_events(head)
        await connection.send_events([each for index in range(queue.size) for each in builder.opening(index)])
        sent, num_tokens = [0] * queue.size, 0
        while queue.num_unfinished:
            events: list[Any] = []
            for index, delta in await queue.take():
                try:
                    _raise_failure(delta)
                except HttpError as error:
                    # The status was sent already, so the stream ends without [DONE].
                    await connection.send_events([builder.failure(error)])
                    await connection.end_events()
                    return
                if delta.text or delta.finish or delta.logprobs:
                    events += builder.chunks(index, delta, sent[index])
                sent[index] += len(delta.text)
                num_tokens += len(delta.tokens)
            await connection.send_events(events)
        await connection.send_events(builder.closing(num_tokens))
        await connection.end_events()


def _raise_failure(delta: Delta) -> None:
    if delta.finish == "cancelled":
        raise HttpError(503, "the server is shutting down", code="cancelled", headers=RETRY)
    if delta.finish == "error":
        raise HttpError(500, f"the engine failed: {delta.error}", code="engine_failed")
