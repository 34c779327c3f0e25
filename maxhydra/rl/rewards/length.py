"""1 at a target length in tokens, decreasing linearly with the distance from it."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    target = term.target
    assert target is not None

    def score(sample: Sample) -> float:
        return max(0.0, 1 - abs(sample.tokens - target) / target)

    return score
