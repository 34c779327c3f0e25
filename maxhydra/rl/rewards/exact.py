"""1 if the extracted answer equals the record's answer, ignoring case and whitespace."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score, normalize


def build(term: Term) -> Score:
    return _score


def _score(sample: Sample) -> float:
    if sample.expected is None:
        raise ValueError("the record has no answer")
    return float(sample.answer is not None and normalize(sample.answer) == normalize(sample.expected))
