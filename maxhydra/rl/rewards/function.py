"""A function of the user's."""

import importlib
from collections.abc import Callable

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    assert term.function is not None
    module, name = term.function.split(":")
    function: Callable[..., float] = getattr(importlib.import_module(module), name)

    def score(answer: Sample) -> float:
        return function(
            answer.text, prompt=answer.prompt, answer=answer.answer, expected=answer.expected, record=answer.record
        )

    return score
