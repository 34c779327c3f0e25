"""A user-defined reward function, `module:function`."""

import importlib
from collections.abc import Callable

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    assert term.function is not None
    module, name = term.function.split(":")
    function: Callable[..., float] = getattr(importlib.import_module(module), name)

    def score(sample: Sample) -> float:
        return function(
            sample.text, prompt=sample.prompt, answer=sample.answer, expected=sample.expected, record=sample.record
        )

    return score
