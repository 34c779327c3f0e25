"""What is sent to the device for a call: all that it must know of its rows in one array, as every array is a transfer.

Columns of a row: its place; the place whose token is drawn, nobody's while a prompt goes on; the position of its first
token; how many follow from there on; top_k and the halves of the seed; the bits of temperature, top_p, min_p and
repetition penalty; its pages; and of a prompt the tokens. A row without a sequence has no tokens and nobody's places.

B rows, T tokens of a row, W pages of a row, C columns.
"""

import struct
from array import array
from collections.abc import Sequence as List
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.buckets import Shape
from maxhydra.decode.sampler import Settings
from maxhydra.decode.scheduler import PrefillChunk
from maxhydra.decode.sequence import Sequence
from maxhydra.layers import PageTable

# The columns before the pages. Rows are put together as bytes: an operation of NumPy on each would take longer than the
# device needs for the first layers of a prompt.
COLUMNS = struct.Struct("=7I4f")
SLOT, TARGET, START, LEFT, TOP_K, SEED, NUMBERS, HEAD = 0, 1, 2, 3, 4, slice(5, 7), slice(7, 11), 11
# No vocabulary has more tokens.
MOST = 2**31 - 1


class Plan(NamedTuple):
    """The columns as a program reads them."""

    rows: PageTable
    target_B: jax.Array
    start_B: jax.Array
    left_B: jax.Array
    settings: Settings
    """How a token at `start_B` is drawn."""
    tokens_BT: jax.Array

    @classmethod
    def of(cls, plan_BC: jax.Array, *, pages: int) -> "Plan":
        whole_BC, end = plan_BC.astype(jnp.int32), HEAD + pages
        temperature_B, top_p_B, min_p_B, penalty_B = jax.lax.bitcast_convert_type(plan_BC[:, NUMBERS], jnp.float32).T
        settings = Settings(
            temperature_B=temperature_B,
            top_k_B=whole_BC[:, TOP_K],
            top_p_B=top_p_B,
            min_p_B=min_p_B,
            penalty_B=penalty_B,
            seed_B2=plan_BC[:, SEED],
            position_B=whole_BC[:, START],
        )
        rows, target_B = PageTable(whole_BC[:, HEAD:end], whole_BC[:, SLOT]), whole_BC[:, TARGET]
        return cls(rows, target_B, whole_BC[:, START], whole_BC[:, LEFT], settings, whole_BC[:, end:])

    def positions(self, tokens: int) -> jax.Array:
        """[B, T]; -1 is padding, which stands after a row's tokens."""
        places_T = jnp.arange(tokens)
        return jnp.where(places_T < self.left_B[:, None], self.start_B[:, None] + places_T, -1)


def later(plan_BC: jax.Array, tokens: int) -> jax.Array:
    """The plan of the rows once so many tokens of each were taken, or all it has."""
    taken_B1, column_C = jnp.minimum(plan_BC[:, LEFT, None], tokens), jnp.arange(plan_BC.shape[1])
    return plan_BC + jnp.where(column_C == START, taken_B1, 0) - jnp.where(column_C == LEFT, taken_B1, 0)


def columns(shape: Shape) -> int:
    return HEAD + shape.pages + (shape.tokens if shape.is_prompt else 0)


def prefill_inputs(parts: List[PrefillChunk], shape: Shape, nobody: int) -> np.ndarray:
    """Parts of prompts, padded to a shape."""
    rows = [
        _row(part.sequence, part.sequence.slot if part.is_last else nobody, part.start, part.length, shape)
        + array("I", part.sequence.request.prompt[part.start : part.stop]).tobytes().ljust(4 * shape.tokens, b"\0")
        for part in parts
    ]
    return _padded(rows, shape, nobody)


def decode_inputs(sequences: List[Sequence], shape: Shape, nobody: int) -> np.ndarray:
    """From the token drawn last of each sequence to the last it may have, padded to a shape."""
    rows = [_row(sequence, sequence.slot, sequence.computed, sequence.left, shape) for sequence in sequences]
    return _padded(rows, shape, nobody)


def _row(sequence: Sequence, target: int, start: int, left: int, shape: Shape) -> bytes:
    """All columns but a prompt's tokens."""
    asked, width = sequence.request, 4 * shape.pages
    integers = sequence.slot, target, start, left, min(asked.top_k, MOST), asked.seed >> 32, asked.seed & 0xFFFFFFFF
    head = COLUMNS.pack(*integers, asked.temperature, asked.top_p, asked.min_p, asked.repetition_penalty)
    return head + sequence.table[:width].ljust(width, b"\0")


def _padded(rows: list[bytes], shape: Shape, nobody: int) -> np.ndarray:
    """With rows without a sequence, which take the likeliest token of all as it is."""
    width = columns(shape)
    nothing = COLUMNS.pack(nobody, nobody, 0, 0, 0, 0, 0, 0, 1, 0, 1).ljust(4 * width, b"\0")
    whole = b"".join([*rows, *[nothing] * (shape.rows - len(rows))])
    return np.frombuffer(whole, np.uint32).reshape(shape.rows, width)
