"""Buckets: the few padded shapes that steps are compiled for, and the sampling features a batch needs.

The neighbours of this module: step_inputs packs a batch into the array of one call, steps are the jitted functions,
compile_cache compiles them per bucket, weight_layout stores the weights for them.
"""

import dataclasses
from collections.abc import Iterable
from collections.abc import Sequence as List

from maxhydra.decode.sampler import SamplingFeatures
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence

# Tokens of the smallest context bucket: below that, attention is too small a part of a step to pay for another program.
MIN_CONTEXT = 128
# Tokens per row of the smallest prefill bucket.
MIN_PREFILL = 16


@dataclasses.dataclass(frozen=True)
class StepShape:
    """Padded shape of one forward call."""

    rows: int
    tokens: int
    """Tokens per row."""
    pages: int
    """Pages per row."""
    is_prefill: bool
    """Prefill: tokens come from the host. Otherwise each row's token is the one it sampled last."""
    is_fresh: bool = False
    """Every row starts at position 0, so its tokens attend to each other only and not to the cache."""

    def covers(self, other: "StepShape") -> bool:
        """Return True if a program of this shape can run a batch of the other."""
        fits = self.rows >= other.rows and self.tokens >= other.tokens and self.pages >= other.pages
        return self.is_prefill == other.is_prefill and fits and (other.is_fresh or not self.is_fresh)

    @property
    def size(self) -> int:
        return self.rows * self.tokens * self.pages

    @property
    def num_steps(self) -> int:
        """Decode steps per call."""
        return 1


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Rounds batches up to the shapes that are compiled."""

    row_multiple: int
    """Row counts are this number times a power of two, so that devices split them evenly."""
    page_size: int
    max_pages: int
    """Pages of the longest sequence."""

    def round_rows(self, count: int) -> int:
        return self.row_multiple * power_of_two(-(-count // self.row_multiple))

    def round_pages(self, tokens: int) -> int:
        """Return the pages of the bucket for a context of `tokens` tokens."""
        needed = -(-max(tokens, MIN_CONTEXT) // self.page_size)
        return min(power_of_two(needed), self.max_pages)

    def prefill_shape(self, chunks: List[PrefillChunk]) -> StepShape:
        """Return the bucket for one prefill call."""
        longest = max(chunk.length for chunk in chunks)
        rows, tokens = self.round_rows(len(chunks)), power_of_two(max(longest, MIN_PREFILL))
        pages, is_fresh = (
            self.round_pages(max(chunk.stop for chunk in chunks)),
            all(chunk.start == 0 for chunk in chunks),
        )
        return StepShape(rows, tokens, pages, is_prefill=True, is_fresh=is_fresh)

    def decode_shape(self, sequences: List[Sequence], *, lookahead: int, extra_rows: int) -> StepShape:
        """Return the bucket for decoding one more token per sequence, some steps later or with additional rows."""
        longest = max(sequence.num_computed for sequence in sequences) + 1 + lookahead
        return StepShape(self.round_rows(len(sequences) + extra_rows), 1, self.round_pages(longest), is_prefill=False)


def sampling_features(sequences: Iterable[Sequence | None]) -> SamplingFeatures:
    """Return the features that at least one of the sequences needs; None entries are padding."""
    present = [sequence for sequence in sequences if sequence is not None]
    return SamplingFeatures(
        random=any(sequence.is_random for sequence in present),
        filters=any(sequence.has_filters for sequence in present),
        penalties=any(sequence.has_penalty for sequence in present),
        logprobs=any(sequence.request.logprobs is not None for sequence in present),
    )


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()
