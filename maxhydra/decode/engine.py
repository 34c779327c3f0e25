"""The engine: a thread that reads prompts, draws tokens and tells what comes of it, many sequences at a time.

The device works ahead of the host by one round. A round sends a part of the prompts that wait to be read, then a step
of all sequences that run, and only then looks at the tokens of the round before. A sequence that turns out to be over
has by then drawn a token too many, which is dropped; whatever that token wrote to the cache lies in pages that are
written again before anyone reads them.
"""

import threading
from collections import deque
from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.config.schema.decode import CacheDtype
from maxhydra.config.schema.decode import Engine as Config
from maxhydra.data import Tokenizer
from maxhydra.decode.buckets import Buckets, Shape, steps_of
from maxhydra.decode.request import Handle, RefusedError, Request, TokenLogprob
from maxhydra.decode.sampler import ALTERNATIVES, SampledTokens
from maxhydra.decode.scheduler import Scheduler
from maxhydra.decode.sequence import Sequence, problem
from maxhydra.decode.step_inputs import decode_inputs, prefill_inputs
from maxhydra.decode.steps import MultiStepKey, Programs
from maxhydra.decode.weight_layout import choose_weight_layout
from maxhydra.layers import PagedCacheSpec
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

Tree = Any
STORAGE = {
    CacheDtype.auto: None,
    CacheDtype.float32: jnp.dtype(jnp.float32),
    CacheDtype.bfloat16: jnp.dtype(jnp.bfloat16),
    CacheDtype.int8: jnp.dtype(jnp.int8),
    CacheDtype.float8: jnp.dtype(jnp.float8_e4m3fn),
}
# Tokens of a burst on an accelerator, where a step is so short that the host would be the slower of the two.
BURST = 8
# Pages before the end of a context's width at which the next width is compiled.
FORESIGHT = 2


class PendingTokens(NamedTuple):
    """Tokens that the device was asked for; None for a row that belongs to nobody."""

    sequences: list[Sequence | None]
    choice: SampledTokens
    """Of one step [B], or of a burst of them [steps, B]."""
    counts: list[int]
    """Tokens of each."""


class ResidentInputs(NamedTuple):
    """Where a burst left its rows. One that goes on from there has its plan on the device."""

    name: MultiStepKey
    sequences: list[Sequence]
    computed: list[int]
    plan_BC: jax.Array


class Engine:
    """Decodes many sequences at once, each as if it were alone. Any thread may call any method."""

    def __init__(
        self,
        model: ModelDef,
        params: Tree,
        tokenizer: Tokenizer,
        config: Config,
        *,
        sharder: Sharder,
        eos: Collection[int],
    ):
        """`eos`: tokens that end an answer."""
        self._tokenizer, self._ends = tokenizer, frozenset(eos)
        self._vocab_size, self._max_batch = model.config.vocab_size, config.max_batch
        self._max_context = config.max_context or model.config.context_length
        pages = -(-config.cache_tokens // config.page_size)
        remembers = not model.config.is_recurrent if config.prefix_cache is None else config.prefix_cache
        self._scheduler = Scheduler(config, pages, remembers=remembers)
        room = PagedCacheSpec(pages, config.page_size, slots=config.max_batch, storage=STORAGE[config.cache_dtype])
        self._buckets = Buckets(sharder.ways("act_batch"), config.page_size, -(-self._max_context // config.page_size))
        # A burst begins when its program is ready and nobody waits, which depends on the time.
        is_single = config.steady or jax.default_backend() == "cpu"
        self._burst = config.burst or (1 if is_single else BURST)
        self._arrangement = choose_weight_layout(model, sharder, jax.default_backend())
        self._params = self._arrangement.keep(params)
        self._programs = Programs(self._arrangement, self._params, room, sharder=sharder, steady=config.steady)
        self._cache, self._board = self._programs.empty()
        self._under_way: deque[PendingTokens] = deque()
        self._standing: ResidentInputs | None = None
        self._tokens_read = self._tokens_drawn = 0

        self._news = threading.Condition()
        self._arrived: list[Sequence] = []
        self._new_params: Tree = None
        self._ended: str | None = None
        """Why the engine takes no more requests."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="decode-engine", daemon=True)
        self._thread.start()

    def submit(self, request: Request) -> Handle:
        """Queue a request; RefusedError at once if it can never be served."""
        return self.submit_all([request])[0]

    def submit_all(self, requests: Iterable[Request]) -> list[Handle]:
        """Queue requests at once; RefusedError, and none is queued, if one can never be served."""
        sequences = [self._sequence(request) for request in requests]
        with self._news:
            self._require(self._ended)
            self._arrived += sequences
            self._news.notify_all()
        return [sequence.handle for sequence in sequences]

    def _sequence(self, request: Request) -> Sequence:
        self._require(problem(request, vocab_size=self._vocab_size, alternatives=ALTERNATIVES))
        length, limit = len(request.prompt), self._max_context
        if length >= limit:
            self._require(
                f"the prompt has {length} tokens, and prompt and answer together at most {limit}: "
                "shorten it, or raise task.engine.max_context"
            )
        sequence = Sequence(request, budget=min(request.max_tokens, limit - length))
        pool = self._scheduler.pool
        if pool.count(sequence.places) > pool.pages:
            self._require(
                f"prompt and answer need {sequence.places} tokens of the cache, which holds "
                f"{pool.pages * pool.page_size}: raise task.engine.cache_tokens, or ask for less than "
                f"max_tokens={request.max_tokens}"
            )
        return sequence

    def stats(self) -> dict[str, float]:
        """Sequences running and waiting, pages in use and cached, tokens written and prompt tokens read so far."""
        scheduler = self._scheduler
        return {
            "running": len(scheduler.running) + len(scheduler.reading),
            "waiting": len(scheduler.waiting) + len(self._arrived),
            "pages": scheduler.pool.pages,
            "pages_used": scheduler.pool.used,
            "pages_kept": scheduler.pool.kept,
            "tokens_written": self._tokens_drawn,
            "prompt_tokens_read": self._tokens_read,
        }

    def update_params(self, params: Tree) -> None:
        """Go on with other weights of the same shapes, from the next step on.

        Kept beginnings of prompts are forgotten; sequences under way go on over what they have in the cache.
        """
        kept = self._arrangement.keep(params)
        with self._news:
            self._require(self._ended)
            self._new_params = kept
            self._news.notify_all()
            self._news.wait_for(lambda: self._new_params is None or self._ended is not None)
            self._require(self._ended)

    def settled(self) -> int:
        """Waits until no program is being compiled. A number that grew if work since the last call used one that was
        not the right one, or had one made."""
        return self._programs.settled()

    def close(self) -> None:
        """End the engine's thread; sequences under way end as cancelled."""
        with self._news:
            self._is_closing = True
            self._news.notify_all()
        self._thread.join()

    def _require(self, refusal: str | None) -> None:
        if refusal is not None:
            raise RefusedError(refusal)

    def _run(self) -> None:
        """Rounds until closed. Whatever goes wrong, every handle hears of it."""
        reason = ""
        try:
            while self._take_in():
                self._round()
        except Exception as error:
            reason = f"the engine failed: {type(error).__name__}: {error}"
        finally:
            with self._news:
                self._ended = reason or "the engine is closed"
                left = [*self._scheduler.waiting, *self._scheduler.reading, *self._scheduler.running, *self._arrived]
                self._news.notify_all()
            for sequence in left:
                if reason:
                    sequence.fail(reason)
                else:
                    sequence.cancel()
            self._programs.close()

    def _take_in(self) -> bool:
        """Wait for something to do; False when there will be nothing any more."""
        with self._news:
            self._news.wait_for(
                lambda: (
                    self._arrived
                    or self._under_way
                    or self._new_params is not None
                    or self._is_closing
                    or not self._scheduler.is_idle
                )
            )
            for sequence in self._arrived:
                self._scheduler.add(sequence)
            self._arrived = []
            if self._new_params is not None:
                self._params, self._new_params = self._new_params, None
                self._scheduler.pool.forget()
                self._news.notify_all()
            return not self._is_closing

    def _round(self) -> None:
        self._scheduler.clear_cancelled()
        earlier = len(self._under_way)
        self._read()
        self._advance()
        for _ in range(earlier):
            self._collect(self._under_way.popleft())

    def _read(self) -> None:
        """Send parts of prompts; a prompt that is whole with it has its first token drawn."""
        parts = self._scheduler.next_parts()
        if not parts:
            return
        needed = self._buckets.of_parts(parts)
        shape = self._programs.shape_for(needed, eventual=needed)
        self._scheduler.read(parts)
        whole = [part.sequence if part.is_last else None for part in parts]
        for sequence in whole:
            if sequence is not None and sequence.penalises:
                self._board = self._programs.note_prompt(self._board, sequence.slot, sequence.request.prompt)
        if rows := self._scheduler.next_rows():
            self._programs.ahead(self._next_shape(rows), steps_of(rows))
        self._tokens_read += sum(part.length for part in parts)
        logits_BV, head_BC = self._forward(shape, prefill_inputs(parts, shape, self._programs.nobody))
        if any(whole):
            self._draw(whole, logits_BV, head_BC)

    def _advance(self) -> None:
        """Send a step of every running sequence, or a burst of steps."""
        rows = self._scheduler.next_rows()
        if not rows or self._advance_far(rows):
            return
        shape = self._next_shape(rows)
        self._foresee(rows, shape)
        logits_BV, head_BC = self._forward(shape, decode_inputs(rows, shape, self._programs.nobody))
        for sequence in rows:
            sequence.computed += 1
        self._draw(list(rows), logits_BV, head_BC)

    def _advance_far(self, rows: list[Sequence]) -> bool:
        """Send a burst if nobody waits who would have to wait for its end, and most of it is needed."""
        left = max(sequence.left for sequence in rows)
        if self._burst == 1 or 2 * left <= self._burst or not self._scheduler.is_settled:
            return False
        name = self._next_burst(rows, min(left, self._burst))
        if name is None:
            return False
        standing, computed = self._standing, [sequence.computed for sequence in rows]
        if standing is not None and standing[:3] == (name, rows, computed):
            plan_BC: np.ndarray | jax.Array = standing.plan_BC
        else:
            plan_BC = decode_inputs(rows, name.shape, self._programs.nobody)
        self._cache, self._board, plan_BC, choice = self._programs.burst(
            name, self._params, self._cache, self._board, plan_BC
        )
        counts = [min(name.length, sequence.left) for sequence in rows]
        for sequence, count in zip(rows, counts, strict=True):
            sequence.computed += count
            sequence.asked += count
        self._standing = ResidentInputs(name, rows, [sequence.computed for sequence in rows], plan_BC)
        self._expect(PendingTokens(list(rows), choice, counts))
        return True

    def _next_burst(self, rows: list[Sequence], length: int) -> MultiStepKey | None:
        """The burst for so many tokens, if there is one by now; the next width of context is compiled before it is
        needed."""
        steps, whole = steps_of(rows), self._burst
        shape = self._buckets.of_rows(rows, later=length - 1, more=0)
        eventual = MultiStepKey(self._buckets.of_rows(rows, later=whole - 1, more=0), steps, whole)
        name = self._programs.burst_for(MultiStepKey(shape, steps, length), eventual=eventual)
        if name is not None:
            soon = MultiStepKey(self._buckets.of_rows(rows, later=2 * whole, more=0), steps, whole)
            if soon.shape.pages > name.shape.pages:
                self._programs.burst_for(soon, eventual=soon)
        return name

    def _next_shape(self, rows: list[Sequence]) -> Shape:
        """The shape in which these rows are advanced: while others come in, rather that of all together."""
        coming = min(len(self._scheduler.waiting) + len(self._scheduler.reading), self._max_batch - len(rows))
        needed = self._buckets.of_rows(rows, later=0, more=0)
        return self._programs.shape_for(needed, eventual=self._buckets.of_rows(rows, later=0, more=coming))

    def _foresee(self, rows: list[Sequence], shape: Shape) -> None:
        """Compile the next width of context before it is needed."""
        soon = self._buckets.of_rows(rows, later=FORESIGHT * self._buckets.page_size, more=0)
        if soon.pages > shape.pages:
            self._programs.ahead(soon, steps_of(rows))

    def _forward(self, shape: Shape, plan_BC: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Logits of the rows, and how to draw from them."""
        logits_BV, self._cache, head_BC = self._programs.forward(shape, self._params, self._cache, self._board, plan_BC)
        return logits_BV, head_BC

    def _draw(self, sequences: list[Sequence | None], logits_BV: jax.Array, head_BC: jax.Array) -> None:
        self._board, choice = self._programs.draw(self._board, logits_BV, head_BC, steps_of(sequences))
        for sequence in sequences:
            if sequence is not None:
                sequence.asked += 1
        self._expect(PendingTokens(sequences, choice, [1] * len(sequences)))

    def _expect(self, drawn: PendingTokens) -> None:
        """Tokens set out for the host as soon as they are drawn, not when it looks for them."""
        for array in jax.tree.leaves(drawn.choice):
            array.copy_to_host_async()
        self._under_way.append(drawn)

    def _collect(self, drawn: PendingTokens) -> None:
        """Wait for tokens that were asked for, and tell their sequences."""
        choice = jax.tree.map(np.asarray, drawn.choice)
        if choice.token_B.ndim == 1:
            choice = jax.tree.map(lambda array: array[None], choice)
        tokens = choice.token_B.T.tolist()
        over: list[Sequence] = []
        for row, (sequence, count) in enumerate(zip(drawn.sequences, drawn.counts, strict=True)):
            if sequence is None or sequence.is_over:
                continue
            asked = sequence.request.logprobs
            logprobs = [] if asked is None else [_logprob(choice, (step, row), asked) for step in range(count)]
            self._tokens_drawn += sequence.take(
                tokens[row][:count], logprobs, tokenizer=self._tokenizer, ends=self._ends
            )
            if sequence.is_over:
                over.append(sequence)
        # Nobody who waits for an answer should wait for the books.
        for sequence in over:
            self._scheduler.leave(sequence)


def _logprob(choice: SampledTokens, place: tuple[int, int], alternatives: int) -> TokenLogprob:
    assert choice.logprob_B is not None
    assert choice.alternatives_BA is not None and choice.alternative_logprobs_BA is not None
    tokens, logprobs = choice.alternatives_BA[place], choice.alternative_logprobs_BA[place]
    pairs = zip(tokens[:alternatives], logprobs[:alternatives], strict=True)
    listed = tuple((int(token), float(logprob)) for token, logprob in pairs)
    return TokenLogprob(int(choice.token_B[place]), float(choice.logprob_B[place]), listed)
