"""What is sent to the device for a call: all that it must know of its rows in one array, as every array is a transfer.

Columns of a row: its place; the place whose token is drawn, nobody's while a prompt goes on; the position of its first
token; how many follow from there on; top_k and the halves of the seed; the bits of temperature, top_p, min_p and
repetition penalty; its pages; and of a prompt the tokens. A row without a sequence has no tokens and nobody's places.

B rows, T tokens of a row, W pages of a row, C columns.
"""

from collections.abc import Sequence as List
from itertools import chain
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.decode.sampler import Settings
from maxhydra.decode.scheduler import Part
from maxhydra.decode.sequence import Sequence
from maxhydra.decode.work import Shape
from maxhydra.layers import Rows

SLOT, TARGET, START, LEFT, TOP_K, SEED, NUMBERS, HEAD = 0, 1, 2, 3, 4, slice(5, 7), slice(7, 11), 11
# Of rows without a sequence: the likeliest token of all, as it is.
PLAIN = np.array((0, 1, 0, 1), np.float32).view(np.uint32)
# No vocabulary has more tokens.
MOST = 2**31 - 1


class Plan(NamedTuple):
    """The columns as a program reads them."""

    rows: Rows
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
        rows, target_B = Rows(whole_BC[:, HEAD:end], whole_BC[:, SLOT]), whole_BC[:, TARGET]
        return cls(rows, target_B, whole_BC[:, START], whole_BC[:, LEFT], settings, whole_BC[:, end:])

    def positions(self, tokens: int) -> jax.Array:
        """[B, T]; -1 is padding, which stands after a row's tokens."""
        places_T = jnp.arange(tokens)
        return jnp.where(places_T < self.left_B[:, None], self.start_B[:, None] + places_T, -1)


def later(plan_BC: jax.Array, tokens: int) -> jax.Array:
    """The plan of the rows once so many tokens of each were taken, or all it has."""
    taken_B = jnp.minimum(plan_BC[:, LEFT], tokens)
    return plan_BC.at[:, START].add(taken_B).at[:, LEFT].add(-taken_B)


def columns(shape: Shape) -> int:
    return HEAD + shape.pages + (shape.tokens if shape.is_prompt else 0)


def reading(parts: List[Part], shape: Shape, nobody: int) -> np.ndarray:
    """Parts of prompts, padded to a shape."""
    plan_BC = advancing([part.sequence for part in parts], shape, nobody)
    bounds = [(part.sequence.slot if part.is_last else nobody, part.start, part.length) for part in parts]
    plan_BC[: len(parts), TARGET : LEFT + 1] = bounds
    is_token_BT = np.arange(shape.tokens) < plan_BC[:, LEFT, None]
    read = (part.sequence.request.prompt[part.start : part.stop] for part in parts)
    plan_BC[:, HEAD + shape.pages :][is_token_BT] = np.fromiter(chain.from_iterable(read), np.uint32)
    return plan_BC


def advancing(sequences: List[Sequence], shape: Shape, nobody: int) -> np.ndarray:
    """From the token drawn last of each sequence to the last it may have, padded to a shape."""
    plan_BC = np.zeros((shape.rows, columns(shape)), np.uint32)
    plan_BC[:, [SLOT, TARGET]] = nobody
    plan_BC[:, NUMBERS] = PLAIN
    integers, numbers = zip(*map(_asked, sequences), strict=True)
    plan_BC[: len(sequences), : NUMBERS.start] = integers
    plan_BC[: len(sequences), NUMBERS] = np.array(numbers, np.float32).view(np.uint32)
    for row, sequence in enumerate(sequences):
        width = min(len(sequence.table), shape.pages)
        plan_BC[row, HEAD : HEAD + width] = sequence.table[:width]
    return plan_BC


def _asked(sequence: Sequence) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The columns before the pages: integers, and numbers."""
    slot, request = sequence.slot, sequence.request
    seed = request.seed >> 32, request.seed & 0xFFFFFFFF
    integers = slot, slot, sequence.computed, sequence.left, min(request.top_k, MOST), *seed
    return integers, (request.temperature, request.top_p, request.min_p, request.repetition_penalty)
