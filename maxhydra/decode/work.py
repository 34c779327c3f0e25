"""What is sent to the device for a call: rows of sequences as arrays, in shapes of which there are few.

B rows, T tokens of a row, W pages of a row.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as List
from itertools import chain
from typing import NamedTuple

import numpy as np

from maxhydra.decode.sampler import Steps
from maxhydra.decode.scheduler import Part
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


class Work(NamedTuple):
    """A call's arrays. A row without a sequence has the last place, and positions of -1."""

    slots_B: np.ndarray
    positions_BT: np.ndarray
    """-1: padding, which stands after the tokens."""
    table_BW: np.ndarray
    tokens_BT: np.ndarray | None
    """None: the token drawn last of each row."""


class Draw(NamedTuple):
    """How each row is drawn, in as few arrays as can be: every one is a transfer. `sampler.Settings` by columns."""

    slots_B: np.ndarray
    integers_B4: np.ndarray
    """position, top_k, and the two halves of the seed."""
    numbers_B4: np.ndarray
    """temperature, top_p, min_p, repetition_penalty."""


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

    def of_parts(self, parts: List[Part]) -> Shape:
        longest = max(part.length for part in parts)
        rows, tokens = self.rows(len(parts)), power_of_two(max(longest, SHORTEST))
        pages, is_fresh = self.pages(max(part.stop for part in parts)), all(part.start == 0 for part in parts)
        return Shape(rows, tokens, pages, is_prompt=True, is_fresh=is_fresh)

    def of_rows(self, sequences: List[Sequence], *, later: int, more: int) -> Shape:
        """The shape of a token more of each: now, so many tokens later, or with so many more rows."""
        longest = max(sequence.computed for sequence in sequences) + 1 + later
        return Shape(self.rows(len(sequences) + more), 1, self.pages(longest), is_prompt=False)


def reading(parts: List[Part], shape: Shape, nobody: int) -> Work:
    """Parts of prompts, padded to a shape."""
    work, places_T = _empty(shape, nobody), np.arange(shape.tokens)
    for row, part in enumerate(parts):
        _place(work, row, part.sequence)
    bounds = np.array([(part.start, part.length) for part in parts])
    is_token_BT = np.zeros((shape.rows, shape.tokens), bool)
    is_token_BT[: len(parts)] = places_T < bounds[:, 1:]
    work.positions_BT[: len(parts)] = np.where(is_token_BT[: len(parts)], bounds[:, :1] + places_T, -1)
    tokens_BT = np.zeros((shape.rows, shape.tokens), np.int32)
    read = (part.sequence.request.prompt[part.start : part.stop] for part in parts)
    tokens_BT[is_token_BT] = np.fromiter(chain.from_iterable(read), np.int32)
    return work._replace(tokens_BT=tokens_BT)


def advancing(sequences: List[Sequence], shape: Shape, nobody: int) -> Work:
    """The token drawn last of each sequence, padded to a shape."""
    work = _empty(shape, nobody)
    for row, sequence in enumerate(sequences):
        _place(work, row, sequence)
        work.positions_BT[row, 0] = sequence.computed
    return work


def drawing(sequences: List[Sequence | None], rows: int, nobody: int) -> Draw:
    """How to draw the next token of each row; None for a row whose prompt goes on, and which draws into nowhere."""
    draw = Draw(np.full(rows, nobody, np.int32), np.zeros((rows, 4), np.uint32), np.zeros((rows, 4), np.float32))
    draw.numbers_B4[:] = (0, 1, 0, 1)
    for row, sequence in enumerate(sequences):
        if sequence is not None:
            request = sequence.request
            position = len(request.prompt) + sequence.asked
            draw.slots_B[row] = sequence.slot
            draw.integers_B4[row] = (position, request.top_k, request.seed >> 32, request.seed & 0xFFFFFFFF)
            draw.numbers_B4[row] = (request.temperature, request.top_p, request.min_p, request.repetition_penalty)
    return draw


def steps_of(sequences: Iterable[Sequence | None]) -> Steps:
    """What any of them needs."""
    there = [sequence for sequence in sequences if sequence is not None]
    return Steps(
        draws=any(sequence.draws for sequence in there),
        filters=any(sequence.filters for sequence in there),
        penalises=any(sequence.penalises for sequence in there),
        reports=any(sequence.request.logprobs is not None for sequence in there),
    )


def power_of_two(least: int) -> int:
    return 1 << max(least - 1, 0).bit_length()


def _empty(shape: Shape, nobody: int) -> Work:
    return Work(
        slots_B=np.full(shape.rows, nobody, np.int32),
        positions_BT=np.full((shape.rows, shape.tokens), -1, np.int32),
        table_BW=np.zeros((shape.rows, shape.pages), np.int32),
        tokens_BT=None,
    )


def _place(work: Work, row: int, sequence: Sequence) -> None:
    width = min(len(sequence.table), work.table_BW.shape[1])
    work.slots_B[row] = sequence.slot
    work.table_BW[row, :width] = sequence.table[:width]
