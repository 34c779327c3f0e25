"""Softmax, loss and the gradient of the logits in one go over each row, for GPUs in Pallas for Triton.

A program takes one row: once over it for the sum of exponentials, then over it again for the gradient, which takes the
place of the logits. Few rows are on their way at a time, and the second look finds its row in the L2 cache: memory sees
the logits once and their gradient once. Exponentials are powers of two, which is what the processors have.

They are taken of the logits as they are, so that threads need not agree on the largest so far; only where that turns
out to be so large or so small that their sum might not be a number are they taken again, less the largest.

Shapes: M tokens, V vocabulary, C logits at a time.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.tiles import Sizes, candidates, resized

LOG2E = math.log2(math.e)
# Below any logit; finite, since the difference of two infinities is not a number.
LOWEST = -1e30
# How far from zero the largest logit may be: e^60 of each of a million still sum up in float32, and e^-60 is no zero.
SAFE = 60.0


class Tile(NamedTuple):
    """What a program does at a time, and how."""

    logits: int
    at_once: int
    """Pieces of so many logits that are on their way together."""
    warps: int


# The fastest of those measured on an H200 with 128,256 logits.
MEASURED = Tile(8192, 4, 32)
# Worth a trial on other vocabularies and cards.
TRIED = (Tile(4096, 4, 16), Tile(8192, 2, 32), Tile(4096, 8, 32), Tile(16384, 2, 32), Tile(8192, 4, 16))
# Of the vocabulary, so that rows begin where loads of 16 bytes may.
MULTIPLE = 64


def cut(vocabulary: int) -> dict[str, int]:
    """What the sizes of the tile must divide, by name: the largest piece of a row."""
    return {"logits": _largest(vocabulary)}


def tried(vocabulary: int) -> dict[str, list[dict[str, int]]]:
    """Sizes to try."""
    return candidates({"": TRIED}, MEASURED, cut(vocabulary))


def _largest(vocabulary: int) -> int:
    return 1 << (vocabulary.bit_length() - 1)


def per_token(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    z_loss: float,
    dtype: np.dtype,
    tile: Tile = MEASURED,
    sizes: Sizes = (),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    V = logits.shape[-1]
    M = logits.size // V
    tile = resized(tile, sizes)
    size = min(tile.logits, _largest(V))
    losses_M, nll_M, d_logits_MV = pl.pallas_call(
        partial(_kernel, size=size, at_once=tile.at_once, z_loss=z_loss),
        grid=(M,),
        out_shape=[
            jax.ShapeDtypeStruct((M,), jnp.float32),
            jax.ShapeDtypeStruct((M,), jnp.float32),
            jax.ShapeDtypeStruct((M, V), dtype),
        ],
        input_output_aliases={0: 2} if logits.dtype == dtype else {},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="cross_entropy",
    )(logits.reshape(M, V), targets.reshape(M), weights.reshape(M).astype(jnp.float32))
    return losses_M.reshape(targets.shape), nll_M.reshape(targets.shape), d_logits_MV.reshape(logits.shape)


class _Row(NamedTuple):
    """A row of logits in pieces. What is left at its end is a piece too, which begins within the one before it."""

    ref: Any
    number: jax.Array
    size: int
    at_once: int

    @property
    def left(self) -> int:
        """Logits after the last whole piece."""
        return self.ref.shape[1] % self.size

    def over(self, visit: Callable[[Any, Sequence[jax.Array | int]], Any], carried: Any) -> Any:
        """visit(carried, starts of pieces) for all whole pieces, `at_once` of them at a time, in order."""
        pieces = self.ref.shape[1] // self.size
        groups = pieces // self.at_once

        def group(number: jax.Array, carried: Any) -> Any:
            return visit(carried, [(number * self.at_once + i) * self.size for i in range(self.at_once)])

        carried = jax.lax.fori_loop(0, groups, group, carried)
        rest = [i * self.size for i in range(groups * self.at_once, pieces)]
        return visit(carried, rest) if rest else carried

    def read(self, start: jax.Array | int) -> jax.Array:
        return self.ref[self.number, pl.ds(start, self.size)]

    def end(self) -> tuple[int, jax.Array, jax.Array]:
        """The start of what is left as a piece, its logits, and which of them are not of the piece before."""
        start = self.ref.shape[1] - self.size
        return start, self.read(start), jnp.arange(self.size) >= self.size - self.left


def _kernel(
    logits_ref: Any,
    targets_ref: Any,
    weights_ref: Any,
    losses_ref: Any,
    nll_ref: Any,
    d_logits_ref: Any,
    *,
    size: int,
    at_once: int,
    z_loss: float,
) -> None:
    V, number = logits_ref.shape[1], pl.program_id(0)
    row = _Row(logits_ref, number, size, at_once)
    target, weight = targets_ref[number], weights_ref[number]
    is_known = (target >= 0) & (target < V)
    own = logits_ref[number, jnp.where(is_known, target, 0)].astype(jnp.float32)

    largest, total = _exponentials(row, jnp.float32(0))
    normaliser = jax.lax.cond(
        jnp.abs(largest) > SAFE,
        lambda: largest + jnp.log2(_exponentials(row, largest)[1]) / LOG2E,
        lambda: jnp.log2(total) / LOG2E,
    )
    nll = normaliser - jnp.where(is_known, own, 0.0)
    nll_ref[number] = nll
    losses_ref[number] = nll + z_loss * normaliser * normaliser
    slope = weight * (1 + 2 * z_loss * normaliser)

    def slopes(logits_C: jax.Array, start: jax.Array | int) -> jax.Array:
        d_C = slope * jnp.exp2(logits_C.astype(jnp.float32) * LOG2E - normaliser * LOG2E)
        is_in = (target >= start) & (target < start + size)
        less = partial(_less_at, place=target - start, amount=weight)
        return jax.lax.cond(is_in, less, lambda d_C: d_C, d_C).astype(d_logits_ref.dtype)

    def write(_: None, starts: Sequence[jax.Array | int]) -> None:
        for start, logits_C in zip(starts, [row.read(start) for start in starts], strict=True):
            d_logits_ref[number, pl.ds(start, size)] = slopes(logits_C, start)

    row.over(write, None)
    if row.left:
        start, logits_C, is_new_C = row.end()
        plt.store(d_logits_ref.at[number, pl.ds(start, size)], slopes(logits_C, start), mask=is_new_C)


def _less_at(d_C: jax.Array, *, place: jax.Array, amount: jax.Array) -> jax.Array:
    return d_C - jnp.where(jnp.arange(d_C.shape[0]) == place, amount, 0.0)


def _exponentials(row: _Row, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of a row, and the sum of all exponentials less that of the reference."""

    def add(carried: tuple[jax.Array, jax.Array], logits_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest_C, sums_C = carried
        wide_C = logits_C.astype(jnp.float32)
        return jnp.maximum(largest_C, wide_C), sums_C + jnp.exp2(wide_C * LOG2E - reference * LOG2E)

    def visit(carried: tuple[jax.Array, jax.Array], starts: Sequence[jax.Array | int]) -> tuple[jax.Array, jax.Array]:
        for logits_C in [row.read(start) for start in starts]:
            carried = add(carried, logits_C)
        return carried

    carried = (jnp.full((row.size,), LOWEST, jnp.float32), jnp.zeros((row.size,), jnp.float32))
    carried = row.over(visit, carried)
    if row.left:
        _, logits_C, is_new_C = row.end()
        carried = add(carried, jnp.where(is_new_C, logits_C.astype(jnp.float32), LOWEST))
    return jnp.max(carried[0]), jnp.sum(carried[1])
