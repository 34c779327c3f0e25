"""1 if the whole completion matches a regular expression."""

import re

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    assert term.pattern is not None
    pattern = re.compile(term.pattern, re.DOTALL)

    def score(sample: Sample) -> float:
        return float(pattern.fullmatch(sample.text) is not None)

    return score
