"""Reward functions: each kind of reward term is a function of a term that returns the score of a sample.

A score is built once in every reward process; if an import fails there, the run ends before it starts. This module does
not import jax, so that the processes start quickly.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

from maxhydra.config.schema.reward import RewardKind, Term


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


Score = Callable[[Sample], float]


def extract_answer(text: str, pattern: str | None) -> str | None:
    """The final answer in a completion: group 1 of the last match of the pattern, or all of it without a pattern."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return matches[-1][1] if matches else None


def normalize(text: object) -> str:
    """Fold case and collapse whitespace."""
    return " ".join(str(text).casefold().split())


def build_score(term: Term) -> Score:
    """The reward function of a term."""
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


def _function(term: Term) -> Score:
    """A user-defined reward function, `module:function`."""
    assert term.function is not None
    module, name = term.function.split(":")
    function: Callable[..., float] = getattr(importlib.import_module(module), name)

    def score(sample: Sample) -> float:
        return function(
            sample.text, prompt=sample.prompt, answer=sample.answer, expected=sample.expected, record=sample.record
        )

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
    RewardKind.function: _function,
    RewardKind.length: _length,
    RewardKind.math: _math,
    RewardKind.overlong: _overlong,
    RewardKind.reasoning_gym: _reasoning_gym,
}
