"""The score that a task of reasoning-gym gives: from 0 to 1, for some tasks with steps between."""

from maxhydra.config.schema.reward import Term
from maxhydra.rl.rewards import Sample, Score


def build(term: Term) -> Score:
    from reasoning_gym import get_score_answer_fn  # noqa: PLC0415

    def score(answer: Sample) -> float:
        # A record of data=reasoning_gym: what the task made, under its own names.
        entry = answer.record["entry"]
        given = None if answer.answer is None else answer.answer.strip()
        return get_score_answer_fn(entry["metadata"]["source_dataset"])(given, entry)

    return score
