"""The state of one request in the engine: its slot and pages, computed and generated tokens, emitted text."""

import dataclasses
from collections.abc import Sequence as List
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import numpy as np

from maxhydra.config.schema.decode import LARGEST
from maxhydra.data import Tokenizer
from maxhydra.decode.detokenize import Detokenizer, StopMatcher
from maxhydra.decode.grammar import Constraint
from maxhydra.decode.page_pool import Place
from maxhydra.decode.request import MAX_BIAS, MEDIA, Delta, Handle, LoadedAdapter, Request, TokenLogprob
from maxhydra.decode.sampler import SamplingFeatures

NOT_FINITE = "the model's logits are NaN or infinite: its weights are corrupt or overflow their dtype"
NO_TOKENS: frozenset[int] = frozenset()


class RejectedToken(NamedTuple):
    """The logits of a token that was sampled without a mask, and that a grammar rejected."""

    logits_SBV: jax.Array
    """Of all steps of its call."""
    step: int
    row: int
    version: int
    """Of the weights that computed them."""


class Sequence:
    """A request, its handle and its progress.

    The device runs ahead of the host: `num_computed` and `num_scheduled` count dispatched work, `tokens` are those that
    the host has read back.
    """

    def __init__(self, request: Request, *, budget: int, adapter: LoadedAdapter | None = None):
        self.request, self.adapter = request, adapter
        self.handle = Handle()
        self.number = -1
        """Position in the order of admission, the same in all processes; -1 before."""
        self.constraint: Constraint | None = None
        """The request's grammar."""
        self.budget = budget
        """Maximum number of tokens to generate."""
        self.position_lag = 0
        """How far positions of RoPE are behind those of the cache: an image takes fewer positions than tokens."""
        self.tokens = list(request.prompt)
        self._max_tokens = len(request.prompt) + budget
        self.num_computed = 0
        """Tokens whose KV cache is computed or in flight."""
        self.num_scheduled = 0
        """Generated tokens, including those in flight."""
        self.num_uncertain = 0
        """Tokens that speculative calls in flight may compute and generate in addition to those that are counted."""
        self.num_drafted = self.num_accepted = 0
        """Tokens that speculative calls drafted for it, and those of them that were accepted."""
        self.rejected: RejectedToken | None = None
        """The next token, if the grammar rejected it, until it is sampled again."""
        self.num_restarts = 0
        self.is_finished = False
        self.place: Place | None = None
        """Slot and pages for decoding; None while it waits."""
        self.prefill_place: Place | None = None
        """Slot and pages of the prefill: the same ones, unless separate devices prefill."""
        self._detokenizer: Detokenizer | None = None
        self._stop_matcher = StopMatcher(request.stop)
        # A stop string is only found in text.
        self._is_streamed = request.stream or bool(request.stop)
        self._has_text = request.detokenize or bool(request.stop)
        self._num_emitted = len(self.tokens)
        """Tokens of prompt and completion that were emitted; only counted by `_append_ids`."""
        self._logprobs: list[TokenLogprob] = []
        """Of tokens that were not emitted yet."""
        self.prompt_logprobs: list[TokenLogprob] = []
        """Of the prompt, if requested, until they are emitted with the first token."""
        self.experts: list[np.ndarray] = []
        """Experts [tokens, L, K] of the tokens whose KV cache is computed, if the engine records them."""

    @property
    def remaining(self) -> int:
        """Tokens that may still be scheduled."""
        return self.budget - self.num_scheduled

    @property
    def cache_tokens(self) -> int:
        """Tokens that the KV cache must hold: the last generated token is never an input."""
        return len(self.request.prompt) + self.budget - 1

    @property
    def num_cached(self) -> int:
        """Tokens that the host knows and whose KV cache is computed or in flight."""
        # Speculative calls in flight are counted with one token per step, also if the sequence is complete before.
        return min(self.num_computed, self.cache_tokens, len(self.tokens))

    @property
    def is_prefilled(self) -> bool:
        return self.num_computed >= len(self.request.prompt)

    @property
    def is_scored(self) -> bool:
        """Whether the log-probabilities of the prompt are requested."""
        return self.request.prompt_logprobs is not None

    @property
    def num_images(self) -> int:
        return 0 if self.request.images is None else len(self.request.images)

    @property
    def has_media(self) -> bool:
        return any(getattr(self.request, name) is not None for name in MEDIA)

    @property
    def is_alone(self) -> bool:
        """Whether the prompt is computed as a whole and shares no pages, for which its tokens alone do not suffice."""
        return self.is_scored or self.has_media

    @property
    def has_penalty(self) -> bool:
        request = self.request
        return bool(request.repetition_penalty != 1 or request.frequency_penalty or request.presence_penalty)

    @property
    def is_verifiable(self) -> bool:
        """Whether a token that its grammar accepts is the same without the mask.

        Filters choose among the tokens that the mask allows, and penalties count tokens that were rejected.
        """
        return not (self.features.filters or self.features.penalties)

    @cached_property
    def features(self) -> SamplingFeatures:
        """What sampling its tokens needs; used from its first step on."""
        request, is_random = self.request, self.request.temperature > 0
        return SamplingFeatures(
            random=is_random,
            filters=is_random and (request.top_k > 0 or request.top_p < 1 or request.min_p > 0),
            penalties=self.has_penalty,
            logprobs=request.logprobs is not None,
            alternatives=bool(request.logprobs),
            bias=bool(request.logit_bias),
            mask=self.constraint is not None,
        )

    def admit(self, place: Place, prefill_place: Place, page_size: int) -> None:
        """Take a slot and pages; tokens of shared pages are computed already."""
        self.place, self.prefill_place = place, prefill_place
        self.num_computed = prefill_place.lease.num_shared * page_size

    def count_least(self, least: int, most: int | None) -> int:
        """Count the least number of tokens of a multi-step call, which may compute up to `most`; return it.

        `most`: None if it computes just as many, unless the sequence is complete with fewer. `num_scheduled` follows
        when the copy of the tokens starts.
        """
        least = min(least, self.remaining)
        self.num_computed += least
        self.num_uncertain += 0 if most is None else most - least
        return least

    def correct_counts(self, counted: int, count: int, most: int) -> None:
        """Replace the counted tokens of a multi-step call by those that it has generated."""
        self.num_computed += count - counted
        self.num_scheduled += count - counted
        self.num_uncertain -= most - counted

    def restart(self, rejected: RejectedToken) -> None:
        """Continue after the last known token: calls in flight continue with one that the grammar rejects."""
        self.num_computed = len(self.tokens)
        self.num_scheduled = len(self.tokens) - len(self.request.prompt)
        self.num_restarts += 1
        self.rejected = rejected

    def append(
        self, tokens: List[int], logprobs: List[TokenLogprob], *, tokenizer: Tokenizer, eos: frozenset[int]
    ) -> int:
        """Append sampled tokens up to the last valid one and emit a delta; return how many were appended."""
        eos = NO_TOKENS if self.request.ignore_eos else eos
        valid = self._cut(tokens, eos)
        if not (self._is_streamed and self._has_text):
            return self._append_ids(valid, logprobs, tokenizer=tokenizer, eos=eos, is_cut=len(valid) < len(tokens))
        if self._detokenizer is None:
            self._detokenizer = self._make_detokenizer(tokenizer)
        text, finish, count = "", None, 0
        # One token at a time when stop strings are set, since any token may complete one.
        for piece in [[token] for token in valid] if self.request.stop else [valid] if valid else []:
            new_text, finish = self._append_piece(piece, self._detokenizer, eos)
            text, count = text + new_text, count + len(piece)
            if finish is not None:
                break
        self.is_finished = finish is not None
        if count:
            experts = self._recorded_experts() if self.is_finished else None
            logprobs, prompt_logprobs = logprobs[:count], self._take_prompt_logprobs()
            self.handle.put(
                Delta(text, tuple(tokens[:count]), tuple(logprobs), finish, "", prompt_logprobs, experts=experts)
            )
        if finish is None and count < len(tokens):
            self.fail(NOT_FINITE)
        return count

    def _make_detokenizer(self, tokenizer: Tokenizer) -> Detokenizer:
        return Detokenizer(tokenizer, self.request.prompt, names_special=self.request.names_special)

    def _append_ids(
        self, valid: List[int], logprobs: List[TokenLogprob], *, tokenizer: Tokenizer, eos: frozenset[int], is_cut: bool
    ) -> int:
        """Append valid tokens, and emit them as ids, or all of the sequence once it is finished."""
        self.tokens += valid
        if logprobs:
            self._logprobs += logprobs[: len(valid)]
        is_eos = bool(valid) and valid[-1] in eos
        self.is_finished = is_eos or len(self.tokens) >= self._max_tokens
        if self.is_finished or (self._is_streamed and valid):
            self._emit_ids(tokenizer, is_eos=is_eos)
        if is_cut and not self.is_finished:
            self.fail(NOT_FINITE)
        return len(valid)

    def _emit_ids(self, tokenizer: Tokenizer, *, is_eos: bool) -> None:
        """Emit the tokens that were not emitted yet; their text only if all are emitted together."""
        new, self._num_emitted = self.tokens[self._num_emitted :], len(self.tokens)
        text, finish, experts = "", None, None
        if self.is_finished:
            finish, experts = "stop" if is_eos else "length", self._recorded_experts()
        if self._has_text:
            detokenizer = self._make_detokenizer(tokenizer)
            text = detokenizer.add(new[:-1] if is_eos else new) + detokenizer.flush()
        logprobs, self._logprobs = tuple(self._logprobs), []
        scores = self._take_prompt_logprobs()
        self.handle.put(Delta(text, tuple(new), logprobs, finish, "", scores, experts, self._has_text))

    def _take_prompt_logprobs(self) -> tuple[TokenLogprob, ...]:
        """The log-probabilities of the prompt, the first time only."""
        taken, self.prompt_logprobs = tuple(self.prompt_logprobs), []
        return taken

    def _recorded_experts(self) -> np.ndarray | None:
        """Experts of all tokens but the last, which was not an input."""
        return np.concatenate(self.experts)[: len(self.tokens) - 1] if self.experts else None

    def _cut(self, tokens: List[int], eos: frozenset[int]) -> List[int]:
        """Cut new tokens after EOS, before an invalid token, or at the maximum."""
        if len(self.tokens) + len(tokens) > self._max_tokens:
            tokens = tokens[: self._max_tokens - len(self.tokens)]
        if min(tokens, default=0) < 0 or not eos.isdisjoint(tokens):
            last = next(index for index, token in enumerate(tokens) if token < 0 or token in eos)
            tokens = tokens[: last + (tokens[last] >= 0)]
        return tokens

    def _append_piece(self, tokens: List[int], detokenizer: Detokenizer, eos: frozenset[int]) -> tuple[str, str | None]:
        """Return the text that tokens add, and the finish reason if the sequence ends with the last of them."""
        self.tokens += tokens
        is_eos = tokens[-1] in eos
        text = self._stop_matcher.add(detokenizer.add(tokens[:-1] if is_eos else tokens))
        is_full = len(self.tokens) >= self._max_tokens
        finish = "stop" if is_eos or self._stop_matcher.is_stopped else "length" if is_full else None
        if finish is not None and not self._stop_matcher.is_stopped:
            text += self._stop_matcher.add(detokenizer.flush())
            text += self._stop_matcher.flush()
        return text, finish

    def cancel(self) -> None:
        self._finish(Delta("", (), finish="cancelled"))

    def fail(self, reason: str) -> None:
        self._finish(Delta("", (), finish="error", error=reason))

    def _finish(self, delta: Delta) -> None:
        if not self.is_finished:
            self.is_finished = True
            self.handle.put(delta)


def find_problem(request: Request, *, vocab_size: int, max_logprobs: int) -> str | None:
    """Return why a request is invalid for an engine of any size; None if it is valid."""
    if not request.prompt:
        return "the prompt is empty: pass at least one token"
    if len(request.logit_bias) > MAX_BIAS:
        return f"logit_bias has {len(request.logit_bias)} tokens; accepted: at most {MAX_BIAS}"
    if not all(0 <= token < vocab_size and abs(value) <= LARGEST for token, value in request.logit_bias):
        return f"logit_bias has a token outside the vocabulary of {vocab_size}, or a value that is not finite"
    if min(request.prompt) < 0 or max(request.prompt) >= vocab_size:
        return f"the prompt has a token outside the vocabulary of {vocab_size}: use the tokenizer of this model"
    if request.grammar and request.ignore_eos:
        return "ignore_eos=true has no effect on a grammar, which says itself where a completion may end: remove it"
    if not 0 <= request.seed < 2**64:
        return f"seed={request.seed!r} is not 0 to 2^64 - 1"
    return _find_sampling_problem(SAMPLING_VALUES(request), max_logprobs)


# All fields between the prompt, the first, and the media, the last, except the seed.
SAMPLING_FIELDS = tuple(field.name for field in dataclasses.fields(Request)[1 : -len(MEDIA)] if field.name != "seed")
SAMPLING_VALUES = attrgetter(*SAMPLING_FIELDS)


@lru_cache
def _find_sampling_problem(values: tuple[Any, ...], max_logprobs: int) -> str | None:
    """Check sampling parameters. Cached: requests submitted together mostly share them, and checks delay the batch."""
    request = Request((), seed=0, **dict(zip(SAMPLING_FIELDS, values, strict=True)))
    bounds = (
        ("max_tokens", request.max_tokens >= 1, "1 or more"),
        ("temperature", 0 <= request.temperature <= LARGEST, f"0 to {LARGEST:g}"),
        ("top_k", request.top_k >= 0, "0 (all tokens) or more"),
        ("top_p", 0 < request.top_p <= 1, "greater than 0 and at most 1"),
        ("min_p", 0 <= request.min_p <= 1, "0 to 1"),
        ("repetition_penalty", 0 < request.repetition_penalty <= LARGEST, f"greater than 0 and at most {LARGEST:g}"),
        ("frequency_penalty", abs(request.frequency_penalty) <= LARGEST, f"-{LARGEST:g} to {LARGEST:g}"),
        ("presence_penalty", abs(request.presence_penalty) <= LARGEST, f"-{LARGEST:g} to {LARGEST:g}"),
        ("stop", all(request.stop), "a list of non-empty strings"),
        ("logprobs", 0 <= (request.logprobs or 0) <= max_logprobs, f"0 to {max_logprobs}"),
        ("prompt_logprobs", 0 <= (request.prompt_logprobs or 0) <= max_logprobs, f"0 to {max_logprobs}"),
    )
    problems = [
        f"{name}={getattr(request, name)!r} is not {accepted}" for name, is_valid, accepted in bounds if not is_valid
    ]
    return "; ".join(problems) or None
