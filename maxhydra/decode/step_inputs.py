"""Buckets, the few padded shapes that steps are compiled for, and the packed inputs of a step.

Everything a call needs to know about its rows is packed into one array, since every array is a transfer. Columns of a
row: its slot; the slot that receives the sampled token (the padding slot for an unfinished prefill); the position of
its first token; the number of tokens from there on; top_k, the number of biased tokens, `Sequence.position_lag` and the
two halves of the seed; the bits of temperature, top_p, min_p and the penalties; its page table; for a prefill the
tokens. A padding row has no tokens and uses the padding slot.

B rows, T tokens per row, W pages per row, C columns.
"""

import dataclasses
import itertools
import struct
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as List
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.page_pool import Place
from maxhydra.decode.sampler import SamplingArrays, SamplingFeatures
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence
from maxhydra.layers import AudioClips, PageTable

# Tokens of the smallest context bucket: below that, attention is too small a part of a step to pay for another program.
MIN_CONTEXT = 128
# Tokens per row of the smallest prefill bucket.
MIN_PREFILL = 16
# Coarse buckets: tokens of the smallest context bucket, and the ratio of each bucket to the one before it. Attention
# kernels for accelerators read the pages that a row has, so a longer page table costs little.
COARSE_CONTEXT, CONTEXT_RATIO, LAST_RATIO = 512, 16, 4
# Coarse buckets: up to here, row counts are powers of four; a step with few rows takes the time of reading the weights.
FEW_ROWS = 64
# Coarse buckets: row count of a prefill call between 1 and the most that fit, and tokens of context that a call with
# several rows may attend to, since prefill gathers the pages of its rows.
PREFILL_ROWS, PREFILL_CONTEXT = 16, 16384


HasPlace = TypeVar("HasPlace", PrefillChunk, Sequence)


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
    is_scored: bool = False
    """Prefill: log-probabilities of the prompt's tokens are computed."""
    images: int = 0
    """Prefill: images per row."""
    clips: int = 0
    """Prefill: audio clips per row."""
    frames: int = 0
    """Prefill: frames per audio clip."""

    def covers(self, other: "StepShape") -> bool:
        """Return True if a program of this shape can run a batch of the other."""
        fits = self.rows >= other.rows and self.pages >= other.pages
        # A decode step with drafts costs more than one without, which is chosen for that reason.
        fits &= self.tokens >= other.tokens if self.is_prefill else self.tokens == other.tokens
        names = ("is_prefill", "is_scored", "images", "clips", "frames")
        is_same = all(getattr(self, name) == getattr(other, name) for name in names)
        return is_same and fits and (other.is_fresh or not self.is_fresh)

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

    groups: int
    """Groups of devices over which a batch is sharded; each has the same number of rows."""
    page_size: int
    max_pages: int
    """Pages of the longest sequence."""
    prefill_chunk: int
    """Maximum number of tokens of a prefill call per group."""
    is_coarse: bool
    """Few buckets, which can all be compiled in advance; otherwise powers of two."""

    def round_rows(self, count: int) -> int:
        """Return the rows of the bucket whose fullest group has `count` rows."""
        rows = power_of_two(count)
        if self.is_coarse and rows <= FEW_ROWS and rows.bit_length() % 2 == 0:
            rows *= 2
        return self.groups * rows

    def arrange_rows(self, items: Iterable[HasPlace], shape: StepShape) -> list[HasPlace | None]:
        """Return the items as rows of a bucket, each in the block of its group; None for padding rows."""
        if self.groups == 1:
            rows: list[HasPlace | None] = list(items)
            return rows + [None] * (shape.rows - len(rows))
        blocks: list[list[HasPlace | None]] = [[] for _ in range(self.groups)]
        for item in items:
            blocks[_group(item)].append(item)
        size = shape.rows // self.groups
        for block in blocks:
            block.extend([None] * (size - len(block)))
        return list(itertools.chain.from_iterable(blocks))

    def round_pages(self, tokens: int) -> int:
        """Return the pages of the bucket for a context of `tokens` tokens."""
        if self.is_coarse:
            size, longest = COARSE_CONTEXT, self.max_pages * self.page_size
            while size < tokens:
                size *= CONTEXT_RATIO
            # The last bucket replaces one that is not much shorter.
            return self.max_pages if longest <= LAST_RATIO * size else -(-size // self.page_size)
        needed = -(-max(tokens, MIN_CONTEXT) // self.page_size)
        return min(power_of_two(needed), self.max_pages)

    def round_tokens(self, length: int) -> int:
        """Return the tokens per row of the bucket for a prefill of `length` tokens."""
        tokens = power_of_two(max(length, MIN_PREFILL))
        if self.is_coarse and tokens.bit_length() % 2 == 0:
            tokens *= 2
        return min(tokens, power_of_two(max(self.prefill_chunk, MIN_PREFILL)))

    def prefill_shape(self, chunks: List[PrefillChunk]) -> StepShape:
        """Return the bucket for one prefill call."""
        tokens = self.round_tokens(max(chunk.length for chunk in chunks))
        pages = self.round_pages(max(chunk.stop for chunk in chunks))
        is_fresh = all(chunk.start == 0 for chunk in chunks)
        count = self._fullest_group(chunks)
        rows = self.round_rows(count)
        if self.is_coarse:
            rows = next(size for size in (*self._prefill_rows(tokens), rows) if size >= self.groups * count)
        is_scored = any(chunk.sequence.is_scored for chunk in chunks)
        images = max(chunk.sequence.num_images for chunk in chunks)
        audio = [chunk.sequence.request.audio for chunk in chunks]
        sizes = [clips.frames.shape[:2] for clips in audio if clips is not None]
        counts = (images, *(max(size, default=0) for size in zip(*sizes, strict=True))) if sizes else (images, 0, 0)
        media = dict(zip(("images", "clips", "frames"), (power_of_two(n) if n else 0 for n in counts), strict=True))
        return StepShape(rows, tokens, pages, is_prefill=True, is_fresh=is_fresh, is_scored=is_scored, **media)

    def _fullest_group(self, items: List[PrefillChunk] | List[Sequence]) -> int:
        """Return the number of rows of the group with the most rows."""
        return len(items) if self.groups == 1 else max(Counter(map(_group, items)).values())

    def split_prefill(self, chunks: List[PrefillChunk]) -> list[List[PrefillChunk]]:
        """Split chunks into calls: prompts with media separately, and few rows together for long contexts."""
        with_media = [chunk for chunk in chunks if chunk.sequence.has_media]
        text = [chunk for chunk in chunks if not chunk.sequence.has_media] if with_media else chunks
        return [*(self._split_text(text) if text else ()), *([with_media] if with_media else ())]

    def split_fill(self, chunks: List[PrefillChunk]) -> Iterator[tuple[StepShape, List[PrefillChunk]]]:
        """Yield the calls that add these tokens to the draft model's cache, each with its bucket."""
        for offset in range(0, max((chunk.length for chunk in chunks), default=0), self.prefill_chunk):
            starts = [(chunk, chunk.start + offset) for chunk in chunks if chunk.length > offset]
            parts = [c._replace(start=at, stop=min(at + self.prefill_chunk, c.stop)) for c, at in starts]
            rows = max(self.prefill_chunk // self.round_tokens(max(part.length for part in parts)), 1)
            if self.is_coarse:
                rows = min(rows, self._cached_rows(self.round_pages(max(part.stop for part in parts))))
            for call in _split_rows(parts, rows, self.groups):
                shape = self.prefill_shape(call)
                yield StepShape(shape.rows, shape.tokens, shape.pages, is_prefill=True), call

    def _split_text(self, chunks: List[PrefillChunk]) -> list[List[PrefillChunk]]:
        if not self.is_coarse or all(chunk.start == 0 for chunk in chunks):
            return [chunks]
        rows = self._cached_rows(self.round_pages(max(chunk.stop for chunk in chunks)))
        return _split_rows(chunks, rows, self.groups)

    def _prefill_rows(self, tokens: int) -> list[int]:
        """Row counts of coarse prefill buckets with `tokens` tokens per row."""
        most = self.round_rows(max(self.prefill_chunk // tokens, 1))
        return sorted({self.groups, min(PREFILL_ROWS * self.groups, most), most})

    def _cached_rows(self, pages: int) -> int:
        """Maximum number of rows per group of a coarse prefill call that attends to a context of `pages` pages."""
        return PREFILL_ROWS if PREFILL_ROWS * pages * self.page_size <= PREFILL_CONTEXT else 1

    def all_shapes(self, max_rows: int) -> Iterator[StepShape]:
        """Yield every coarse bucket: all that batches of up to `max_rows` rows per group can come to need."""
        contexts = [self.round_pages(1)]
        while contexts[-1] < self.max_pages:
            contexts.append(self.round_pages(contexts[-1] * self.page_size + 1))
        row_counts = sorted({self.round_rows(count) for count in range(1, max_rows + 1)})
        yield from (StepShape(rows, 1, pages, is_prefill=False) for rows in row_counts for pages in contexts)
        longest = min(self.prefill_chunk, self.max_pages * self.page_size)
        for tokens in sorted({self.round_tokens(length) for length in range(1, longest + 1)}):
            fresh_pages = self.round_pages(min(tokens, longest))
            for rows in self._prefill_rows(tokens):
                yield StepShape(rows, tokens, fresh_pages, is_prefill=True, is_fresh=True)
                for pages in contexts:
                    if pages >= fresh_pages and rows <= self.round_rows(self._cached_rows(pages)):
                        yield StepShape(rows, tokens, pages, is_prefill=True)

    def decode_shape(self, sequences: List[Sequence], *, lookahead: int, extra_rows: int) -> StepShape:
        """Return the bucket for decoding one more token per sequence, some steps later or with additional rows."""
        longest = max(sequence.num_computed for sequence in sequences) + 1 + lookahead
        count = max(self._fullest_group(sequences), -(-(len(sequences) + extra_rows) // self.groups))
        return StepShape(self.round_rows(count), 1, self.round_pages(longest), is_prefill=False)

    def history_shape(self, sequences: List[Sequence], step_tokens: int, *, num_steps: int) -> StepShape:
        """Return the bucket for steps that each generate up to `step_tokens` tokens per sequence."""
        # The inputs of the steps, and the last token that they generate, which the history holds.
        lookahead = num_steps * step_tokens + 1
        longest = max(min(each.num_computed + each.num_uncertain + lookahead, each.cache_tokens) for each in sequences)
        rows = self.round_rows(self._fullest_group(sequences))
        return StepShape(rows, step_tokens, self.round_pages(longest), is_prefill=False)


def _split_rows(chunks: List[PrefillChunk], rows: int, groups: int) -> list[List[PrefillChunk]]:
    """Split chunks into calls of up to `rows` rows per group."""
    by_group = [[chunk for chunk in chunks if _group(chunk) == number] for number in range(groups)]
    starts = range(0, max(map(len, by_group)), rows)
    return [[chunk for group in by_group for chunk in group[start : start + rows]] for start in starts]


def _group(item: PrefillChunk | Sequence) -> int:
    assert item.place is not None
    return item.place.group


def sampling_features(sequences: Iterable[Sequence | None]) -> SamplingFeatures:
    """Return the features that at least one of the sequences needs; None entries are padding."""
    needed = {sequence.features for sequence in sequences if sequence is not None}
    return SamplingFeatures(*map(any, zip(*needed, strict=True)))


def power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(least - 1, 0).bit_length()


# The columns before the page table. Rows are assembled as bytes: one NumPy operation per row would take longer than the
# device needs for the first layers of a prompt.
HEAD_STRUCT = struct.Struct("=6Ii2I6f")
SLOT, TARGET, START, REMAINING, TOP_K, NUM_BIAS, LAG = range(7)
SEED, FLOATS, HEAD = slice(7, 9), slice(9, 15), 15
# Columns are read as int32; no vocabulary is larger.
MAX_TOP_K = 2**31 - 1


class StepInputs(NamedTuple):
    """The unpacked columns, inside a program."""

    rows: PageTable
    target_B: jax.Array
    start_B: jax.Array
    remaining_B: jax.Array
    sampling: SamplingArrays
    """Sampling parameters of a token at `start_B`."""
    tokens_BT: jax.Array
    lag_B: jax.Array
    """How far positions of RoPE are behind those of the cache."""

    @classmethod
    def unpack(cls, inputs_BC: jax.Array, *, pages: int) -> "StepInputs":
        integers_BC, end = inputs_BC.astype(jnp.int32), HEAD + pages
        floats_BC = jax.lax.bitcast_convert_type(inputs_BC[:, FLOATS], jnp.float32)
        temperature_B, top_p_B, min_p_B, penalty_B, frequency_B, presence_B = floats_BC.T
        sampling = SamplingArrays(
            temperature_B=temperature_B,
            top_k_B=integers_BC[:, TOP_K],
            top_p_B=top_p_B,
            min_p_B=min_p_B,
            penalty_B=penalty_B,
            frequency_B=frequency_B,
            presence_B=presence_B,
            seed_B2=inputs_BC[:, SEED],
            position_B=integers_BC[:, START],
            num_bias_B=integers_BC[:, NUM_BIAS],
        )
        rows, target_B = PageTable(integers_BC[:, HEAD:end], integers_BC[:, SLOT]), integers_BC[:, TARGET]
        start_B, remaining_B = integers_BC[:, START], integers_BC[:, REMAINING]
        lag_B = integers_BC[:, LAG]
        return cls(rows, target_B, start_B, remaining_B, sampling, integers_BC[:, end:], lag_B)

    def positions(self, tokens: int) -> jax.Array:
        """Return positions [B, T]; -1 marks padding, which follows a row's tokens."""
        offsets_T = jnp.arange(tokens)
        return jnp.where(offsets_T < self.remaining_B[:, None], self.start_B[:, None] + offsets_T, -1)


def advance(inputs_BC: jax.Array, tokens: int) -> jax.Array:
    """Return the inputs after `tokens` tokens of each row, or after all that the row has left."""
    taken_B1, column_C = jnp.minimum(inputs_BC[:, REMAINING, None], tokens), jnp.arange(inputs_BC.shape[1])
    return inputs_BC + jnp.where(column_C == START, taken_B1, 0) - jnp.where(column_C == REMAINING, taken_B1, 0)


def num_columns(shape: StepShape) -> int:
    """A prompt that is scored has one more token: the next one, whose log-probability is computed."""
    return HEAD + shape.pages + (shape.tokens + shape.is_scored if shape.is_prefill else 0)


def prefill_inputs(rows: List[PrefillChunk | None], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Pack prompt chunks; None is a padding row."""

    def pack(chunk: PrefillChunk) -> bytes:
        target = chunk.place.slot if chunk.is_last else padding_slot
        head = _pack_head(chunk.sequence, chunk.place, (target, chunk.start, chunk.length), shape)
        tokens = array("I", chunk.sequence.request.prompt[chunk.start : chunk.stop + shape.is_scored])
        return head + tokens.tobytes().ljust(4 * (shape.tokens + shape.is_scored), b"\0")

    return _join_rows([None if chunk is None else pack(chunk) for chunk in rows], shape, padding_slot)


def fill_inputs(rows: List[PrefillChunk | None], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Pack chunks whose tokens are in the histories."""
    shape = dataclasses.replace(shape, is_prefill=False)

    def pack(chunk: PrefillChunk) -> bytes:
        return _pack_head(chunk.sequence, chunk.place, (padding_slot, chunk.start, chunk.length), shape)

    return _join_rows([None if chunk is None else pack(chunk) for chunk in rows], shape, padding_slot)


def image_inputs(rows: List[PrefillChunk | None], shape: StepShape) -> np.ndarray | None:
    """[B, images, *model.vision.image_shape] of a prefill call, zeros for images that a row does not have."""
    images = [None if chunk is None else chunk.sequence.request.images for chunk in rows]
    first = next((pixels for pixels in images if pixels is not None), None)
    if first is None:
        return None
    stacked = np.zeros((shape.rows, shape.images, *first.shape[1:]), np.float32)
    for row, pixels in enumerate(images):
        if pixels is not None:
            stacked[row, : len(pixels)] = pixels
    return stacked


def audio_inputs(rows: List[PrefillChunk | None], shape: StepShape) -> AudioClips | None:
    """Audio clips of a prefill call, of length 0 for clips that a row does not have."""
    audio = [None if chunk is None else chunk.sequence.request.audio for chunk in rows]
    first = next((clips for clips in audio if clips is not None), None)
    if first is None:
        return None
    frames = np.zeros((shape.rows, shape.clips, shape.frames, first.frames.shape[2]), np.float32)
    lengths = np.zeros((shape.rows, shape.clips), np.int32)
    for row, clips in enumerate(audio):
        if clips is not None:
            count, longest = clips.frames.shape[:2]
            frames[row, :count, :longest], lengths[row, :count] = clips
    return AudioClips(frames, lengths)


def decode_inputs(rows: List[Sequence | None], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Pack running sequences, from their last sampled token to the last token they may generate."""

    progress = [(0, 0) if each is None else (each.num_computed, each.remaining) for each in rows]
    return _pack_sequences(rows, progress, shape, padding_slot)


def resample_inputs(rows: List[Sequence | None], padding_slot: int) -> np.ndarray:
    """Pack sequences whose next token is sampled again; their step takes the place of the number of tokens."""
    progress = [(len(each.tokens), each.rejected.step) if each and each.rejected else (0, 0) for each in rows]
    return _pack_sequences(rows, progress, StepShape(len(rows), 1, 0, is_prefill=False), padding_slot)


def _pack_sequences(
    rows: List[Sequence | None], progress: List[tuple[int, int]], shape: StepShape, padding_slot: int
) -> np.ndarray:
    packed: list[bytes | None] = []
    for sequence, each in zip(rows, progress, strict=True):
        place = sequence and sequence.place
        packed.append(_pack_head(sequence, place, (place.slot, *each), shape) if sequence and place else None)
    return _join_rows(packed, shape, padding_slot)


def _pack_head(sequence: Sequence, place: Place, progress: tuple[int, int, int], shape: StepShape) -> bytes:
    """Pack all columns except the tokens of a prompt. `progress`: target slot, start, and number of tokens."""
    request, width = sequence.request, 4 * shape.pages
    seed = request.seed >> 32, request.seed & 0xFFFFFFFF
    top_k, num_bias = min(request.top_k, MAX_TOP_K), len(request.logit_bias)
    integers = place.slot, *progress, top_k, num_bias, sequence.position_lag, *seed
    penalties = request.repetition_penalty, request.frequency_penalty, request.presence_penalty
    head = HEAD_STRUCT.pack(*integers, request.temperature, request.top_p, request.min_p, *penalties)
    return head + place.page_table[:width].ljust(width, b"\0")


def _join_rows(rows: List[bytes | None], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Join packed rows; a padding row has no tokens and samples greedily into the padding slot."""
    width = num_columns(shape)
    padding = HEAD_STRUCT.pack(padding_slot, padding_slot, *7 * (0,), 0, 1, 0, 1, 0, 0).ljust(4 * width, b"\0")
    packed = b"".join(padding if row is None else row for row in rows)
    return np.frombuffer(packed, np.uint32).reshape(shape.rows, width)
