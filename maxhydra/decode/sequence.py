"""One request on its way through the engine: what is in the cache, what was drawn, what was told."""

import dataclasses
from array import array
from collections.abc import Iterator
from collections.abc import Sequence as List
from functools import lru_cache
from operator import attrgetter
from typing import Any

from maxhydra.config.schema.decode import LARGEST
from maxhydra.data import Tokenizer
from maxhydra.decode.detokenize import Detokenizer, Stopper
from maxhydra.decode.page_pool import PageLease
from maxhydra.decode.request import Delta, Handle, Request, TokenLogprob


class Sequence:
    """A request, its handle, and where it stands.

    The device is ahead of the host: `computed` and `asked` count what was sent to it, `tokens` what came back.
    """

    def __init__(self, request: Request, *, budget: int):
        self.request = request
        self.handle = Handle()
        self.budget = budget
        """Tokens to draw at most."""
        self.tokens = list(request.prompt)
        self.computed = 0
        """Tokens whose keys and values are in the cache, or on the way."""
        self.asked = 0
        """Tokens drawn, or on the way."""
        self.is_over = False
        self.slot = -1
        self.lease: PageLease | None = None
        self.table = b""
        """Its pages, 4 bytes each."""
        self._words: Detokenizer | None = None
        self._stopper = Stopper(request.stop)

    @property
    def left(self) -> int:
        """Tokens that may still be asked for."""
        return self.budget - self.asked

    @property
    def places(self) -> int:
        """Tokens that the cache must hold: the last to be drawn is never read."""
        return len(self.request.prompt) + self.budget - 1

    @property
    def drawn(self) -> int:
        return len(self.tokens) - len(self.request.prompt)

    @property
    def is_prompt_read(self) -> bool:
        return self.computed >= len(self.request.prompt)

    @property
    def draws(self) -> bool:
        return self.request.temperature > 0

    @property
    def filters(self) -> bool:
        request = self.request
        return self.draws and (request.top_k > 0 or request.top_p < 1 or request.min_p > 0)

    @property
    def penalises(self) -> bool:
        return self.request.repetition_penalty != 1

    def settle(self, lease: PageLease, slot: int, page_size: int) -> None:
        """Take a place; what others left in shared pages need not be computed again."""
        self.lease, self.slot = lease, slot
        self.table = array("I", lease.pages).tobytes()
        self.computed = lease.shared * page_size

    def take(
        self, tokens: List[int], logprobs: List[TokenLogprob], *, tokenizer: Tokenizer, ends: frozenset[int]
    ) -> int:
        """Tokens that were drawn: tell what is new, up to the one that was the last. How many that are."""
        if self._words is None:
            self._words = Detokenizer(tokenizer, self.request.prompt)
        text, finish, count = "", None, 0
        ends = frozenset() if self.request.ignore_eos else ends
        for piece in self._pieces(tokens, ends):
            more, finish = self._add(piece, self._words, ends)
            text, count = text + more, count + len(piece)
            if finish is not None:
                break
        self.is_over = finish is not None
        if count:
            self.handle.put(Delta(text, tuple(tokens[:count]), tuple(logprobs[:count]), finish))
        if finish is None and count < len(tokens):
            self.fail("the model's logits are not numbers: its weights are broken, or overflow their number format")
        return count

    def _pieces(self, tokens: List[int], ends: frozenset[int]) -> Iterator[List[int]]:
        """Tokens that are told at once, up to one that ends the answer for sure or is none: all, or one by one where a
        stop text may end it with any of them."""
        tokens = tokens[: self.budget - self.drawn]
        if min(tokens) < 0 or not ends.isdisjoint(tokens):
            last = next(place for place, token in enumerate(tokens) if token < 0 or token in ends)
            tokens = tokens[: last + (tokens[last] >= 0)]
        return ([token] for token in tokens) if self.request.stop else iter([tokens] if tokens else [])

    def _add(self, tokens: List[int], words: Detokenizer, ends: frozenset[int]) -> tuple[str, str | None]:
        """The text that tokens add, and why the sequence ends with the last of them, if it does."""
        self.tokens += tokens
        is_end = tokens[-1] in ends
        text = self._stopper.add(words.add(tokens[:-1] if is_end else tokens))
        is_full = self.drawn >= self.budget
        finish = "stop" if is_end or self._stopper.is_stopped else "length" if is_full else None
        if finish is not None and not self._stopper.is_stopped:
            text += self._stopper.add(words.rest())
            text += self._stopper.rest()
        return text, finish

    def cancel(self) -> None:
        self._end(Delta("", (), finish="cancelled"))

    def fail(self, reason: str) -> None:
        self._end(Delta("", (), finish="error", error=reason))

    def _end(self, delta: Delta) -> None:
        if not self.is_over:
            self.is_over = True
            self.handle.put(delta)


def problem(request: Request, *, vocab_size: int, alternatives: int) -> str | None:
    """What is wrong with a request whatever the engine's size; None if nothing is."""
    if not request.prompt:
        return "the prompt is empty: give at least one token"
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        return f"the prompt has a token outside the vocabulary of {vocab_size}: the tokenizer is not this model's"
    return _wrong(SETTINGS(request), alternatives)


SETTINGS = attrgetter(*(field.name for field in dataclasses.fields(Request) if field.name != "prompt"))


@lru_cache
def _wrong(settings: tuple[Any, ...], alternatives: int) -> str | None:
    """What is wrong with settings. Requests that come together mostly ask alike, and wait for each other."""
    request = Request((), *settings)
    bounds = (
        ("max_tokens", request.max_tokens >= 1, "1 or more"),
        ("temperature", 0 <= request.temperature <= LARGEST, f"0 to {LARGEST:g}"),
        ("top_k", request.top_k >= 0, "0 (all tokens) or more"),
        ("top_p", 0 < request.top_p <= 1, "over 0 and at most 1"),
        ("min_p", 0 <= request.min_p <= 1, "from 0 to 1"),
        ("repetition_penalty", 0 < request.repetition_penalty <= LARGEST, f"over 0 and at most {LARGEST:g}"),
        ("seed", 0 <= request.seed < 2**64, "0 to 2^64 - 1"),
        ("stop", all(request.stop), "texts that are not empty"),
        ("logprobs", request.logprobs is None or 0 <= request.logprobs <= alternatives, f"0 to {alternatives}"),
    )
    wrong = [f"{name}={getattr(request, name)!r} is not {accepted}" for name, is_met, accepted in bounds if not is_met]
    return "; ".join(wrong) or None
