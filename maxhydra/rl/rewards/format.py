"""Whether a text has a form."""

import re

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    assert term.pattern is not None
    pattern = re.compile(term.pattern, re.DOTALL)

    def score(answer: Sample) -> float:
        return float(pattern.fullmatch(answer.text) is not None)

    return score
