"""Schema of an evaluation task in a YAML file: where its questions come from and how answers are scored."""

from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema, section
from maxhydra.config.errors import Problem
from maxhydra.config.schema.data import OPERATORS
from maxhydra.config.schema.reward import RewardKind, Term, pattern_problems


class EvalKind(Enum):
    multiple_choice = "multiple_choice"
    generation = "generation"
    perplexity = "perplexity"


class QuestionSource(Enum):
    file = "file"
    arithmetic = "arithmetic"
    reasoning_gym = "reasoning_gym"
    cloze = "cloze"
    plays = "plays"
    needle = "needle"


# Kinds of tasks that questions of a source can be used in.
KINDS = {
    QuestionSource.file: tuple(EvalKind),
    QuestionSource.arithmetic: (EvalKind.generation,),
    QuestionSource.reasoning_gym: (EvalKind.generation,),
    QuestionSource.cloze: (EvalKind.multiple_choice,),
    QuestionSource.plays: (EvalKind.perplexity,),
    QuestionSource.needle: (EvalKind.generation,),
}
# Verifiers that need neither another model nor code of the user.
VERIFIERS = (RewardKind.exact, RewardKind.math, RewardKind.format, RewardKind.reasoning_gym)


@schema
class EvalSpec(Schema):
    """An evaluation task."""

    kind: EvalKind = EvalKind.generation
    """multiple_choice: the likeliest choice is the answer; generation: a verifier scores a completion; perplexity: loss
    and bits per byte of texts."""
    source: QuestionSource = QuestionSource.file
    """file: the questions in path; arithmetic and reasoning_gym: held-out problems; cloze: missing last words of lines
    of the plays; plays: their held-out text; needle: a sentence to find in a long text."""
    path: str | None = None
    """file: .jsonl with `question`, `choices` and `answer` (an index), or `question` and `answer`; for perplexity, with
    `text`, or a .txt file. Relative to the YAML file."""
    count: int = option(100, ge=1)
    """Maximum number of questions, of needle per context length and depth."""
    shots: int = option(0, ge=0)
    """Solved questions before each question: the first ones of the task, which are then not asked."""
    digits: int = option(2, ge=1, le=9)
    """arithmetic: maximum digits of the numbers."""
    operators: list[str] = option(["+"])
    """arithmetic: a subset of + - *."""
    name: str | None = None
    """reasoning_gym: task, such as chain_sum."""
    lengths: list[int] = option([256, 512, 1024])
    """needle: lengths of the context in tokens."""
    depths: list[float] = option([0.0, 0.5, 1.0])
    """needle: positions of the sentence in the context, from 0 (the start) to 1 (the end)."""
    max_tokens: int = option(16, ge=1)
    """generation: maximum tokens of a completion."""
    stop: list[str] = option([])
    """generation: stop strings."""
    answer: str | None = None
    """generation: regular expression whose first group, at its last match, is the answer. null: the whole
    completion."""
    verifier: Term = section(Term)

    def check(self) -> Iterator[Problem]:
        if self.kind not in KINDS[self.source]:
            accepted = ", ".join(kind.value for kind in KINDS[self.source])
            yield Problem("kind", f"is not supported by source={self.source.value}", self.kind, accepted=accepted)
        if (self.path is None) != (self.source is not QuestionSource.file):
            reason = "is needed by source=file" if self.path is None else f"is not used by source={self.source.value}"
            yield Problem("path", reason, value=self.path)
        if (self.name is None) != (self.source is not QuestionSource.reasoning_gym):
            reason = "is needed by" if self.name is None else "is only used by"
            yield Problem("name", f"{reason} source=reasoning_gym", value=self.name, accepted="such as chain_sum")
        if not self.operators or not {*self.operators} <= {*OPERATORS}:
            yield Problem("operators", "is not a set of operators", self.operators, accepted=" ".join(OPERATORS))
        if not self.lengths or min(self.lengths) < 1 or not all(0 <= depth <= 1 for depth in self.depths):
            yield Problem(
                "lengths", "or depths are out of range", self.lengths, accepted="lengths over 0, depths 0 to 1"
            )
        if self.shots and self.kind is EvalKind.perplexity:
            yield Problem("shots", "is not used by kind=perplexity", value=self.shots, accepted="0")
        if self.verifier.kind not in VERIFIERS:
            accepted = ", ".join(kind.value for kind in VERIFIERS)
            yield Problem("verifier.kind", "is not a verifier", value=self.verifier.kind, accepted=accepted)
        yield from pattern_problems("answer", self.answer, groups=1)
