"""The score of a reasoning-gym task, from 0 to 1; some tasks give partial credit."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415

    def score(sample: Sample) -> float:
        # A record of data=reasoning_gym: the generated entry, with reasoning-gym's own field names.
        entry = sample.record["entry"]
        given = None if sample.answer is None else sample.answer.strip()
        return get_score_answer_fn(entry["metadata"]["source_dataset"])(given, entry)

    return score
