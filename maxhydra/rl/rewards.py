"""Reward functions: each kind of reward term is a function of a term that returns the scores of a unit of samples.

A unit is the input of one call: a completion, all completions of a prompt, or all of a rollout.

A score is built once in every reward process; if an import fails there, the run ends before it starts. This module does
not import jax, so that the processes start quickly.
"""

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from maxhydra.config.plug_ins import bind_options, load_object
from maxhydra.config.schema.reward import RewardKind, Scope, Term
from maxhydra.rl.judge import Judge


@dataclasses.dataclass(frozen=True)
class Sample:
    """The input of a reward function: a completion, its prompt and the record of the prompt."""

    prompt: str
    text: str
    """The completion."""
    answer: str | None
    """The final answer that reward.answer extracts from the completion; None if it does not match."""
    expected: Any
    """The record's answer."""
    record: dict[str, Any]
    """The other columns of the prompt's record."""
    tokens: int
    """Length of the completion in tokens."""
    ids: tuple[int, ...] = ()
    """Token ids of prompt and completion, for reward models; reward processes do not receive them."""


Score = Callable[[Sample], float]
# Scores of the samples of a unit; of a concurrent term, an awaitable. User code may return anything.
UnitScore = Callable[[Sequence[Sample]], Any]


def extract_answer(text: str, pattern: str | None) -> str | None:
    """The final answer in a completion: group 1 of the last match of the pattern, or all of it without a pattern."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return matches[-1][1] if matches else None


def normalize(text: object) -> str:
    """Fold case and collapse whitespace."""
    return " ".join(str(text).casefold().split())


def unit_indices(term: Term, count: int, group_size: int) -> list[range]:
    """The units of a term among `count` samples, of which `group_size` consecutive ones have the same prompt."""
    size = {Scope.completion: 1, Scope.group: group_size, Scope.batch: max(count, 1)}[term.scope]
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def units_at_a_time(term: Term, unit_size: int) -> int | None:
    """Number of units that are scored concurrently; None if the term is not concurrent.

    A judge makes a request for each ordered pair of a group: more groups at a time would only share its requests, and
    each would take longer.
    """
    if term.concurrency is None or term.kind is not RewardKind.judge or term.scope is Scope.completion:
        return term.concurrency
    return math.ceil(term.concurrency / max(1, unit_size * (unit_size - 1)))


def build_unit_score(term: Term, *, timeout: float) -> UnitScore:
    """The reward function of a term, over units; `timeout` limits the seconds of a call."""
    if term.kind is RewardKind.function:
        return _function(term)
    if term.kind is RewardKind.judge:
        return _judge(term, timeout)
    score = BUILDERS[term.kind](term)
    return lambda unit: [score(sample) for sample in unit]


def build_score(term: Term) -> Score:
    """The reward function of a built-in term, over single samples."""
    return BUILDERS[term.kind](term)


def _exact(term: Term) -> Score:
    """1 if the extracted answer equals the record's answer, ignoring case and whitespace."""

    def score(sample: Sample) -> float:
        if sample.expected is None:
            raise ValueError("the record has no answer")
        return float(sample.answer is not None and normalize(sample.answer) == normalize(sample.expected))

    return score


def _format(term: Term) -> Score:
    """1 if the whole completion matches a regular expression."""
    assert term.pattern is not None
    pattern = re.compile(term.pattern, re.DOTALL)

    def score(sample: Sample) -> float:
        return float(pattern.fullmatch(sample.text) is not None)

    return score


def _length(term: Term) -> Score:
    """1 at a target length in tokens, decreasing linearly with the distance from it."""
    target = term.target
    assert target is not None

    def score(sample: Sample) -> float:
        return max(0.0, 1 - abs(sample.tokens - target) / target)

    return score


def _overlong(term: Term) -> Score:
    """0 up to target - buffer tokens, falling linearly to -1 at target (soft overlong punishment, Yu et al., 2025)."""
    target, buffer = term.target, term.buffer
    assert target is not None and buffer is not None

    def score(sample: Sample) -> float:
        return min(0.0, max(-1.0, (target - buffer - sample.tokens) / buffer))

    return score


def _function(term: Term) -> UnitScore:
    """A user-defined reward function, `module:function`."""
    assert term.function is not None
    key = "reward.terms.*.function"
    plug_in = load_object(term.function, key=key)
    is_async = inspect.iscoroutinefunction(plug_in)
    function = partial(plug_in, **bind_options(plug_in, term.options, key=key))
    if is_async != (term.concurrency is not None):
        raise TypeError(
            "is async, so concurrency must be a number of calls"
            if is_async
            else "is not async: concurrency must be null"
        )

    def one(unit: Sequence[Sample]) -> Any:
        (sample,) = unit
        return function(
            sample.text, prompt=sample.prompt, answer=sample.answer, expected=sample.expected, record=sample.record
        )

    def several(unit: Sequence[Sample]) -> Any:
        return function(
            [sample.text for sample in unit],
            prompts=[sample.prompt for sample in unit],
            answers=[sample.answer for sample in unit],
            expected=[sample.expected for sample in unit],
            records=[sample.record for sample in unit],
        )

    if term.scope is not Scope.completion:
        return several
    if not is_async:
        return lambda unit: [one(unit)]

    async def awaited(unit: Sequence[Sample]) -> list[Any]:
        return [await one(unit)]

    return awaited


def _judge(term: Term, timeout: float) -> UnitScore:
    """Ratings by a language model, or the win rates in a group."""
    assert term.concurrency is not None
    judge = Judge(term.judge, concurrency=term.concurrency, timeout=timeout)

    async def score(unit: Sequence[Sample]) -> list[Any]:
        first = unit[0]
        if term.scope is Scope.group:
            return await judge.win_rates(first.prompt, first.expected, [sample.text for sample in unit])
        return [await judge.rate(first.prompt, first.expected, first.text)]

    return score


def _math(term: Term) -> Score:
    """1 if the answers are mathematically equal according to math-verify: 0.5, 1/2 and \\frac{1}{2} are equal."""
    from math_verify import parse, verify  # noqa: PLC0415

    def score(sample: Sample) -> float:
        if sample.expected is None:
            raise ValueError("the record has no answer")
        # math-verify's timeouts use SIGALRM, which does not interrupt C code; reward.timeout kills the process instead.
        expected = parse(str(sample.expected), parsing_timeout=None)
        if not expected:
            raise ValueError(f"the record's answer {sample.expected!r} is not a mathematical expression")
        given = parse(sample.answer or "", parsing_timeout=None)
        return float(verify(expected, given, timeout_seconds=None))

    return score


def _reasoning_gym(term: Term) -> Score:
    """The score of a reasoning-gym task, from 0 to 1; some tasks give partial credit."""
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415

    def score(sample: Sample) -> float:
        # A record of data=reasoning_gym: the generated entry, with reasoning-gym's own field names.
        entry = sample.record["entry"]
        given = None if sample.answer is None else sample.answer.strip()
        return get_score_answer_fn(entry["metadata"]["source_dataset"])(given, entry)

    return score


BUILDERS: dict[RewardKind, Callable[[Term], Score]] = {
    RewardKind.exact: _exact,
    RewardKind.format: _format,
    RewardKind.length: _length,
    RewardKind.math: _math,
    RewardKind.overlong: _overlong,
    RewardKind.reasoning_gym: _reasoning_gym,
}
