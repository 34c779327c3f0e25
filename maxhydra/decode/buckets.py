"""The work of a call: its shape, of which there are few, and what must be known to draw its tokens."""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as List

from maxhydra.decode.sampler import SamplingFeatures
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence

# Tokens of the narrowest context: below that, attention is too small a part of a step to pay for another program.
NARROWEST = 128
# Tokens of the shortest part of a prompt that has a program of its own.
SHORTEST = 16


@dataclasses.dataclass(frozen=True)
class Shape:
    """Rows, tokens of a row, pages of a row; is_prompt: the tokens come from the host, and are not those drawn last;
    is_fresh: every row begins with them, so that they look at each other alone and not at pages."""

    rows: int
    tokens: int
    pages: int
    is_prompt: bool
    is_fresh: bool = False

    def holds(self, other: "Shape") -> bool:
        """Whether the other's work can be done in this shape."""
        fits = self.rows >= other.rows and self.tokens >= other.tokens and self.pages >= other.pages
        return self.is_prompt == other.is_prompt and fits and (other.is_fresh or not self.is_fresh)

    @property
    def size(self) -> int:
        return self.rows * self.tokens * self.pages

    @property
    def length(self) -> int:
        """Steps of a call."""
        return 1


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Which shapes there are."""

    row_step: int
    """Rows come in this many times a power of two: devices split them evenly."""
    page_size: int
    max_pages: int
    """Pages of the longest sequence."""

    def rows(self, count: int) -> int:
        return self.row_step * power_of_two(-(-count // self.row_step))

    def pages(self, tokens: int) -> int:
        """Pages of a context of so many tokens."""
        needed = -(-max(tokens, NARROWEST) // self.page_size)
        return min(power_of_two(needed), self.max_pages)

    def of_parts(self, parts: List[PrefillChunk]) -> Shape:
        longest = max(part.length for part in parts)
        rows, tokens = self.rows(len(parts)), power_of_two(max(longest, SHORTEST))
        pages, is_fresh = self.pages(max(part.stop for part in parts)), all(part.start == 0 for part in parts)
        return Shape(rows, tokens, pages, is_prompt=True, is_fresh=is_fresh)

    def of_rows(self, sequences: List[Sequence], *, later: int, more: int) -> Shape:
        """The shape of a token more of each: now, so many tokens later, or with so many more rows."""
        longest = max(sequence.computed for sequence in sequences) + 1 + later
        return Shape(self.rows(len(sequences) + more), 1, self.pages(longest), is_prompt=False)


def steps_of(sequences: Iterable[Sequence | None]) -> SamplingFeatures:
    """What any of them needs."""
    there = [sequence for sequence in sequences if sequence is not None]
    return SamplingFeatures(
        draws=any(sequence.draws for sequence in there),
        filters=any(sequence.filters for sequence in there),
        penalises=any(sequence.penalises for sequence in there),
        reports=any(sequence.request.logprobs is not None for sequence in there),
    )


def power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()
