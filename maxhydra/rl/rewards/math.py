"""1 if the answers are mathematically equal according to math-verify: 0.5, 1/2 and \\frac{1}{2} are equal."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    from math_verify import parse, verify  # noqa: PLC0415

    def score(sample: Sample) -> float:
        if sample.expected is None:
            raise ValueError("the record has no answer")
        # math-verify's timeouts use SIGALRM, which does not interrupt C code; reward.timeout kills the process instead.
        expected = parse(str(sample.expected), parsing_timeout=None)
        if not expected:
            raise ValueError(f"the record's answer {sample.expected!r} is not a mathematical expression")
        given = parse(sample.answer or "", parsing_timeout=None)
        return float(verify(expected, given, timeout_seconds=None))

    return score
