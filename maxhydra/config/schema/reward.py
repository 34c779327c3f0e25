"""What an answer is worth: a weighted sum of terms, each a verifiable fact about the answer."""

import re
from collections.abc import Iterator
from enum import Enum

from maxhydra.config.declare import Schema, option, schema
from maxhydra.config.errors import Problem, did_you_mean

OnFault = Enum("OnFault", ["zero", "raise"])

# Fields that a kind of term cannot do without; no other kind has a use for them.
NEEDED = {"format": "pattern", "length": "target", "function": "function"}


@schema
class Term(Schema):
    """One thing that is looked at in an answer, as a number; 1 is right and 0 is wrong where it can be either."""

    kind: str = option("exact", one_of="maxhydra.rl.rewards")
    """exact: the answer is the one known, whatever its case and spaces; math: it is equal to it as a mathematical
    expression; format: the text matches a pattern; length: how near the text is to a number of tokens; function: your
    own; reasoning_gym: the score of the task that the prompt is from."""
    weight: float = 1.0
    """What the term counts for in the sum."""
    pattern: str | None = None
    """format: regular expression that the whole text is to match; `.` matches line breaks too."""
    target: int | None = option(None, ge=1)
    """length: tokens that score 1; the score falls to 0 in a straight line at none and at twice as many."""
    function: str | None = None
    """function: `package.module:function`, called as function(text, prompt=, answer=, expected=, record=) -> number, in
    a process of its own."""

    def check(self) -> Iterator[Problem]:
        for kind, field in NEEDED.items():
            value = getattr(self, field)
            if self.kind == kind and value is None:
                yield Problem(field, f"is needed by kind={kind}", value=None)
            if self.kind != kind and value is not None:
                yield Problem(field, f"is not used by kind={self.kind}", value=value, accepted="null")
        if self.function is not None and self.function.count(":") != 1:
            yield Problem("function", "names no function", value=self.function, accepted="package.module:function")
        yield from pattern_problems("pattern", self.pattern, groups=0)


@schema
class Reward(Schema):
    """The terms of a reward, and how they are computed."""

    terms: dict[str, Term] = option({})
    """Terms by a name of your choice; their weighted sum is the reward."""
    answer: str | None = None
    """Regular expression whose first group, where it matches last, is the answer within a text, such as
    <answer>(.*?)</answer>; without a match there is none. null: the whole text."""
    passes: str | None = None
    """Term that decides whether an answer is right, in evaluation. null: the first."""
    pass_at: float = 1.0
    """An answer is right where that term, before its weight, reaches this."""
    timeout: float = option(5.0, gt=0)
    """Seconds that a term may take for one answer; its process is then ended."""
    workers: int = option(1, ge=1)
    """Processes that compute rewards."""
    on_error: OnFault = OnFault.zero
    """A term that raises, takes too long or gives no finite number: zero counts it as 0, names it in the log and counts
    it in reward/errors; raise ends the run."""

    def check(self) -> Iterator[Problem]:
        yield from pattern_problems("answer", self.answer, groups=1)
        if self.passes is not None and self.passes not in self.terms:
            yield Problem(
                "passes",
                "names no term of reward.terms",
                value=self.passes,
                accepted=", ".join(self.terms) or "null: there are no terms",
                hint=did_you_mean(self.passes, self.terms),
            )


def pattern_problems(field: str, pattern: str | None, *, groups: int) -> Iterator[Problem]:
    """What is wrong with a regular expression that is to have at least so many groups."""
    try:
        if pattern is not None and re.compile(pattern).groups < groups:
            yield Problem(
                field, "has no group", value=pattern, accepted="a regular expression with ( ) around the answer"
            )
    except re.error as error:
        yield Problem(field, f"is not a regular expression: {error}", value=pattern)
