"""The known answer, whatever its case and spaces."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score, normalised


def build(term: Term) -> Score:
    return _score


def _score(answer: Sample) -> float:
    if answer.expected is None:
        raise ValueError("the record has no answer")
    return float(answer.answer is not None and normalised(answer.answer) == normalised(answer.expected))
