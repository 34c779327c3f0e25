"""What an answer is worth. A module of this package is one kind of term, chosen by `kind`.

Each has `build(term) -> Score`, which is called once in every process that computes rewards; an import that fails there
ends the run before it begins. No jax here: such a process starts in a moment.
"""

import dataclasses
import importlib
import re
from collections.abc import Callable
from typing import Any

from maxhydra.config.schema.reward import Term


@dataclasses.dataclass(frozen=True)
class Sample:
    """A text that a model wrote, and what is known about it."""

    prompt: str
    text: str
    answer: str | None
    """What reward.answer finds in the text; None: nothing."""
    expected: Any
    """The record's answer."""
    record: dict[str, Any]
    """The other columns of the prompt's record."""
    tokens: int
    """How many the text has."""


Score = Callable[[Sample], float]


def build_score(term: Term) -> Score:
    """The function of a term."""
    built: Score = importlib.import_module(f"{__name__}.{term.kind}").build(term)
    return built


def extract_answer(text: str, pattern: str | None) -> str | None:
    """The answer within a text: what the pattern's first group matches last, or the whole text without a pattern."""
    if pattern is None:
        return text
    matches = list(re.finditer(pattern, text, re.DOTALL))
    return matches[-1][1] if matches else None


def normalised(text: object) -> str:
    """Text in which case and spaces make no difference."""
    return " ".join(str(text).casefold().split())
