"""How near a text is to a number of tokens."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    target = term.target
    assert target is not None

    def score(answer: Sample) -> float:
        return max(0.0, 1 - abs(answer.tokens - target) / target)

    return score
