"""Softmax, loss and the gradient of the logits in one kernel, for GPUs in Pallas for Triton.

A program handles one row: one pass for the sum of exponentials, a second one for the gradient, which overwrites the
logits. Few rows are in flight at a time, so the second pass hits the L2 cache: memory sees the logits once and their
gradient once. Exponentials are computed as powers of two, which GPUs have in hardware.

They are taken of the raw logits, so threads need not agree on a running maximum. Only if the maximum turns out so large
or small that the sum might overflow or underflow are they computed again, relative to the maximum.

A vocabulary that is split over devices takes two kernels: the passes are separated by the exchange of the sums.

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

from maxhydra.kernels.tiles import Sizes, candidates, override_sizes

LOG2E = math.log2(math.e)
# Below any logit; finite, since the difference of two infinities is NaN.
LOWEST = -1e30
# Largest safe magnitude of the maximum: a million terms of e^60 still sum up in float32, and e^-60 is not zero.
SAFE = 60.0


class Tile(NamedTuple):
    """Work of a program per step, and launch parameters."""

    logits: int
    unroll: int
    """Pieces of `logits` elements that are loaded together."""
    warps: int


# The fastest measured on an H200 with a vocabulary of 128,256.
MEASURED = Tile(8192, 4, 32)
# Candidates for other vocabularies and GPUs.
CANDIDATE_TILES = (Tile(4096, 4, 16), Tile(8192, 2, 32), Tile(4096, 8, 32), Tile(16384, 2, 32), Tile(8192, 4, 16))
# The vocabulary size must be a multiple of this, so that rows are aligned to loads of 16 bytes.
MULTIPLE = 16


def tile_extents(vocabulary: int) -> dict[str, int]:
    """The extent that each tile size must divide, by name: the largest piece of a row."""
    return {"logits": _largest(vocabulary)}


def candidate_tiles(vocabulary: int) -> dict[str, list[dict[str, int]]]:
    """Candidate tile sizes."""
    return candidates({"": CANDIDATE_TILES}, MEASURED, tile_extents(vocabulary))


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
    tile = override_sizes(tile, sizes)
    size = min(tile.logits, _largest(V))
    losses_M, nll_M, d_logits_MV = pl.pallas_call(
        partial(_kernel, size=size, unroll=tile.unroll, z_loss=z_loss),
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


def statistics(
    logits: jax.Array, targets: jax.Array, *, tile: Tile = MEASURED, sizes: Sizes = (), interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """logsumexp of a part of the vocabulary, and the target's logit, 0 if it is not in this part."""
    V = logits.shape[-1]
    M, tile = logits.size // V, override_sizes(tile, sizes)
    outputs = pl.pallas_call(
        partial(_statistics_kernel, size=min(tile.logits, _largest(V)), unroll=tile.unroll),
        grid=(M,),
        out_shape=[jax.ShapeDtypeStruct((M,), jnp.float32)] * 2,
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="cross_entropy_statistics",
    )(logits.reshape(M, V), targets.reshape(M))
    normaliser, target_logit = (x_M.reshape(targets.shape) for x_M in outputs)
    return normaliser, target_logit


def gradient(
    logits: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    normaliser: jax.Array,
    *,
    z_loss: float,
    dtype: np.dtype,
    tile: Tile = MEASURED,
    sizes: Sizes = (),
    interpret: bool = False,
) -> jax.Array:
    """The gradient of a part of the logits, given the logsumexp of all; overwrites the logits."""
    V = logits.shape[-1]
    M, tile = logits.size // V, override_sizes(tile, sizes)
    d_logits_MV = pl.pallas_call(
        partial(_gradient_kernel, size=min(tile.logits, _largest(V)), unroll=tile.unroll, z_loss=z_loss),
        grid=(M,),
        out_shape=jax.ShapeDtypeStruct((M, V), dtype),
        input_output_aliases={0: 0} if logits.dtype == dtype else {},
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=interpret,
        name="cross_entropy_gradient",
    )(logits.reshape(M, V), targets.reshape(M), weights.reshape(M).astype(jnp.float32), normaliser.reshape(M))
    return d_logits_MV.reshape(logits.shape)


class _Row(NamedTuple):
    """A row of logits in pieces. The remainder is also a full piece, which overlaps the one before it."""

    ref: Any
    number: jax.Array
    size: int
    unroll: int

    @property
    def remainder(self) -> int:
        """Logits after the last full piece."""
        return self.ref.shape[1] % self.size

    def fold(self, visit: Callable[[Any, Sequence[jax.Array | int]], Any], carry: Any) -> Any:
        """Fold visit(carry, starts of pieces) over all full pieces in order, `unroll` of them at a time."""
        pieces = self.ref.shape[1] // self.size
        groups = pieces // self.unroll

        def group(number: jax.Array, carry: Any) -> Any:
            return visit(carry, [(number * self.unroll + i) * self.size for i in range(self.unroll)])

        carry = jax.lax.fori_loop(0, groups, group, carry)
        rest = [i * self.size for i in range(groups * self.unroll, pieces)]
        return visit(carry, rest) if rest else carry

    def read(self, start: jax.Array | int) -> jax.Array:
        return self.ref[self.number, pl.ds(start, self.size)]

    def end(self) -> tuple[int, jax.Array, jax.Array]:
        """The start of the remainder's piece, its logits, and the mask of those not in the piece before."""
        start = self.ref.shape[1] - self.size
        return start, self.read(start), jnp.arange(self.size) >= self.size - self.remainder


def _kernel(
    logits_ref: Any,
    targets_ref: Any,
    weights_ref: Any,
    losses_ref: Any,
    nll_ref: Any,
    d_logits_ref: Any,
    *,
    size: int,
    unroll: int,
    z_loss: float,
) -> None:
    number = pl.program_id(0)
    row = _Row(logits_ref, number, size, unroll)
    target, weight = targets_ref[number], weights_ref[number]
    is_known, target_logit = _target_logit(logits_ref, number, target)

    normaliser = _normaliser(row)
    nll = normaliser - jnp.where(is_known, target_logit, 0.0)
    nll_ref[number] = nll
    losses_ref[number] = nll + z_loss * normaliser * normaliser
    _write_gradient(row, d_logits_ref, target, (weight, normaliser), z_loss)


def _statistics_kernel(
    logits_ref: Any, targets_ref: Any, normaliser_ref: Any, target_logit_ref: Any, *, size: int, unroll: int
) -> None:
    number = pl.program_id(0)
    is_known, target_logit = _target_logit(logits_ref, number, targets_ref[number])
    normaliser_ref[number] = _normaliser(_Row(logits_ref, number, size, unroll))
    target_logit_ref[number] = jnp.where(is_known, target_logit, 0.0)


def _gradient_kernel(
    logits_ref: Any,
    targets_ref: Any,
    weights_ref: Any,
    normaliser_ref: Any,
    d_logits_ref: Any,
    *,
    size: int,
    unroll: int,
    z_loss: float,
) -> None:
    number = pl.program_id(0)
    row, factors = _Row(logits_ref, number, size, unroll), (weights_ref[number], normaliser_ref[number])
    _write_gradient(row, d_logits_ref, targets_ref[number], factors, z_loss)


def _target_logit(logits_ref: Any, number: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether the target is in the vocabulary, and its logit if it is."""
    is_known = (target >= 0) & (target < logits_ref.shape[1])
    return is_known, logits_ref[number, jnp.where(is_known, target, 0)].astype(jnp.float32)


def _normaliser(row: _Row) -> jax.Array:
    """logsumexp of a row."""
    largest, total = _exponentials(row, jnp.float32(0))
    return jax.lax.cond(
        jnp.abs(largest) > SAFE,
        lambda: largest + jnp.log2(_exponentials(row, largest)[1]) / LOG2E,
        lambda: jnp.log2(total) / LOG2E,
    )


def _write_gradient(
    row: _Row, d_logits_ref: Any, target: jax.Array, factors: tuple[jax.Array, jax.Array], z_loss: float
) -> None:
    """Write the gradient of a row; factors: weight and logsumexp of the token."""
    (weight, normaliser), number, size = factors, row.number, row.size
    slope = weight * (1 + 2 * z_loss * normaliser)

    def slopes(logits_C: jax.Array, start: jax.Array | int) -> jax.Array:
        d_C = slope * jnp.exp2(logits_C.astype(jnp.float32) * LOG2E - normaliser * LOG2E)
        has_target = (target >= start) & (target < start + size)
        subtract = partial(_subtract_at, index=target - start, amount=weight)
        return jax.lax.cond(has_target, subtract, lambda d_C: d_C, d_C).astype(d_logits_ref.dtype)

    def write(_: None, starts: Sequence[jax.Array | int]) -> None:
        for start, logits_C in zip(starts, [row.read(start) for start in starts], strict=True):
            d_logits_ref[number, pl.ds(start, size)] = slopes(logits_C, start)

    row.fold(write, None)
    if row.remainder:
        start, logits_C, is_new_C = row.end()
        plt.store(d_logits_ref.at[number, pl.ds(start, size)], slopes(logits_C, start), mask=is_new_C)


def _subtract_at(d_C: jax.Array, *, index: jax.Array, amount: jax.Array) -> jax.Array:
    return d_C - jnp.where(jnp.arange(d_C.shape[0]) == index, amount, 0.0)


def _exponentials(row: _Row, reference: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The largest logit of a row, and the sum of exp(logit - reference)."""

    def add(carry: tuple[jax.Array, jax.Array], logits_C: jax.Array) -> tuple[jax.Array, jax.Array]:
        largest_C, sums_C = carry
        wide_C = logits_C.astype(jnp.float32)
        return jnp.maximum(largest_C, wide_C), sums_C + jnp.exp2(wide_C * LOG2E - reference * LOG2E)

    def visit(carry: tuple[jax.Array, jax.Array], starts: Sequence[jax.Array | int]) -> tuple[jax.Array, jax.Array]:
        for logits_C in [row.read(start) for start in starts]:
            carry = add(carry, logits_C)
        return carry

    carry = (jnp.full((row.size,), LOWEST, jnp.float32), jnp.zeros((row.size,), jnp.float32))
    carry = row.fold(visit, carry)
    if row.remainder:
        _, logits_C, is_new_C = row.end()
        carry = add(carry, jnp.where(is_new_C, logits_C.astype(jnp.float32), LOWEST))
    return jnp.max(carry[0]), jnp.sum(carry[1])
