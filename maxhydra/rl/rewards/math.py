"""Equality as mathematical expressions, by math-verify: 0.5, 1/2 and \\frac{1}{2} are the same answer."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    from math_verify import parse, verify  # noqa: PLC0415

    def score(answer: Sample) -> float:
        if answer.expected is None:
            raise ValueError("the record has no answer")
        # Its own time limits are alarms, which a computation in C does not hear: ours ends the process.
        expected = parse(str(answer.expected), parsing_timeout=None)
        if not expected:
            raise ValueError(f"the record's answer {answer.expected!r} is no mathematical expression")
        given = parse(answer.answer or "", parsing_timeout=None)
        return float(verify(expected, given, timeout_seconds=None))

    return score
