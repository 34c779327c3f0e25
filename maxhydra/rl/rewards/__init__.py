"""Reward functions. A module of this package is one kind of reward term, chosen by `kind`.

Each module has `build(term) -> Score`, which is called once in every reward process; if an import fails there, the run
ends before it starts. Modules here do not import jax, so that the processes start quickly.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

from maxhydra.config.schema.reward import Term


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


def build_score(term: Term) -> Score:
    """The reward function of a term."""
    score: Score = importlib.import_module(f"{__name__}.{term.kind}").build(term)
    return score


def extract_answer(text: str, pattern: str | None) -> str | None:
    """The final answer in a completion: group 1 of the last match of the pattern, or all of it without a pattern."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return matches[-1][1] if matches else None


def normalize(text: object) -> str:
    """Fold case and collapse whitespace."""
    return " ".join(str(text).casefold().split())
