"""Step inputs: everything a call needs to know about its rows, packed into one array, since every array is a transfer.

Columns of a row: its slot; the slot that receives the sampled token (the padding slot for an unfinished prefill); the
position of its first token; the number of tokens from there on; top_k and the two halves of the seed; the bits of
temperature, top_p, min_p and repetition penalty; its page table; for a prefill the tokens. A padding row has no tokens
and uses the padding slot.

B rows, T tokens per row, W pages per row, C columns.
"""

import struct
from array import array
from collections.abc import Sequence as List
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.buckets import StepShape
from maxhydra.decode.sampler import SamplingArrays
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence
from maxhydra.layers import PageTable

# The columns before the page table. Rows are assembled as bytes: one NumPy operation per row would take longer than the
# device needs for the first layers of a prompt.
HEAD_STRUCT = struct.Struct("=7I4f")
SLOT, TARGET, START, REMAINING, TOP_K, SEED, FLOATS, HEAD = 0, 1, 2, 3, 4, slice(5, 7), slice(7, 11), 11
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

    @classmethod
    def unpack(cls, inputs_BC: jax.Array, *, pages: int) -> "StepInputs":
        integers_BC, end = inputs_BC.astype(jnp.int32), HEAD + pages
        temperature_B, top_p_B, min_p_B, penalty_B = jax.lax.bitcast_convert_type(inputs_BC[:, FLOATS], jnp.float32).T
        sampling = SamplingArrays(
            temperature_B=temperature_B,
            top_k_B=integers_BC[:, TOP_K],
            top_p_B=top_p_B,
            min_p_B=min_p_B,
            penalty_B=penalty_B,
            seed_B2=inputs_BC[:, SEED],
            position_B=integers_BC[:, START],
        )
        rows, target_B = PageTable(integers_BC[:, HEAD:end], integers_BC[:, SLOT]), integers_BC[:, TARGET]
        start_B, remaining_B = integers_BC[:, START], integers_BC[:, REMAINING]
        return cls(rows, target_B, start_B, remaining_B, sampling, integers_BC[:, end:])

    def positions(self, tokens: int) -> jax.Array:
        """Return positions [B, T]; -1 marks padding, which follows a row's tokens."""
        offsets_T = jnp.arange(tokens)
        return jnp.where(offsets_T < self.remaining_B[:, None], self.start_B[:, None] + offsets_T, -1)


def advance(inputs_BC: jax.Array, tokens: int) -> jax.Array:
    """Return the inputs after `tokens` tokens of each row, or after all that the row has left."""
    taken_B1, column_C = jnp.minimum(inputs_BC[:, REMAINING, None], tokens), jnp.arange(inputs_BC.shape[1])
    return inputs_BC + jnp.where(column_C == START, taken_B1, 0) - jnp.where(column_C == REMAINING, taken_B1, 0)


def num_columns(shape: StepShape) -> int:
    return HEAD + shape.pages + (shape.tokens if shape.is_prefill else 0)


def prefill_inputs(chunks: List[PrefillChunk], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Pack prompt chunks, padded to a bucket."""
    rows = [
        _pack_head(
            chunk.sequence, chunk.sequence.slot if chunk.is_last else padding_slot, chunk.start, chunk.length, shape
        )
        + array("I", chunk.sequence.request.prompt[chunk.start : chunk.stop]).tobytes().ljust(4 * shape.tokens, b"\0")
        for chunk in chunks
    ]
    return _pad_rows(rows, shape, padding_slot)


def decode_inputs(sequences: List[Sequence], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Pack running sequences, from their last sampled token to the last token they may generate."""
    rows = [
        _pack_head(sequence, sequence.slot, sequence.num_computed, sequence.remaining, shape) for sequence in sequences
    ]
    return _pad_rows(rows, shape, padding_slot)


def _pack_head(sequence: Sequence, target: int, start: int, remaining: int, shape: StepShape) -> bytes:
    """Pack all columns except the tokens of a prompt."""
    request, width = sequence.request, 4 * shape.pages
    seed = request.seed >> 32, request.seed & 0xFFFFFFFF
    integers = sequence.slot, target, start, remaining, min(request.top_k, MAX_TOP_K), *seed
    head = HEAD_STRUCT.pack(*integers, request.temperature, request.top_p, request.min_p, request.repetition_penalty)
    return head + sequence.page_table[:width].ljust(width, b"\0")


def _pad_rows(rows: list[bytes], shape: StepShape, padding_slot: int) -> np.ndarray:
    """Append padding rows, which have no tokens and sample greedily into the padding slot."""
    width = num_columns(shape)
    padding = HEAD_STRUCT.pack(padding_slot, padding_slot, 0, 0, 0, 0, 0, 0, 1, 0, 1).ljust(4 * width, b"\0")
    packed = b"".join([*rows, *[padding] * (shape.rows - len(rows))])
    return np.frombuffer(packed, np.uint32).reshape(shape.rows, width)
