"""Shared by the grouped matmul kernels: tables that map tiles of rows to groups, and the gradients.

Two kernels serve the forward pass and both gradients: the gradient of x is another grouped matmul, in which outputs
play the role of inputs, and that of w sums over the rows of each group. If x is multiplied by two matrices of its
group, its gradient is a single matmul over the outputs of both.

M rows, E groups, K inputs, N outputs, T tiles.
"""

from functools import partial
from typing import Protocol, TypeAlias

import jax
import jax.numpy as jnp

Pair: TypeAlias = tuple[jax.Array, jax.Array]


def tile_table(sizes_E: jax.Array, M: int, rows: int) -> jax.Array:
    """[tiles, 4]: group, index of the row tile, first row, end row; an extra group holds the rows of no group."""
    sizes_E = sizes_E.astype(jnp.int32)
    sizes_G = jnp.append(sizes_E, M - jnp.sum(sizes_E))
    end_G = jnp.cumsum(sizes_G)
    start_G = end_G - sizes_G
    count_G = jnp.where(sizes_G > 0, -(-end_G // rows) - start_G // rows, 0)
    below_G = jnp.cumsum(count_G)
    tile_T = jnp.arange(M // rows + len(sizes_E))
    group_T = jnp.sum(tile_T[:, None] >= below_G[None, :], axis=1)
    is_used_T, group_or_last_T = group_T < len(sizes_G), jnp.minimum(group_T, len(sizes_E))
    block_T = start_G[group_or_last_T] // rows + tile_T - (below_G - count_G)[group_or_last_T]
    first_T, end_T = (
        jnp.maximum(start_G[group_or_last_T], block_T * rows),
        jnp.minimum(end_G[group_or_last_T], (block_T + 1) * rows),
    )
    table = jnp.stack([group_or_last_T, block_T, first_T, end_T], axis=1)
    return jnp.where(is_used_T[:, None], table, jnp.array([len(sizes_E), 0, 0, 0]))


def spans(sizes_E: jax.Array, rows: int, align: int) -> tuple[jax.Array, jax.Array]:
    """[E] each: the first row of a group's first tile, rounded down to a multiple of `align`, and its tile count."""
    end_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    first_E = (end_E - sizes_E) // align * align
    return first_E, jnp.where(sizes_E > 0, -((first_E - end_E) // rows), 0)


def edges(x_MK: jax.Array, sizes_E: jax.Array, rows: int, align: int) -> jax.Array:
    """The first and the last tile of each group, with the rows of other groups set to zero."""
    first_E, count_E = spans(sizes_E, rows, align)
    end_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    tile_E2 = jnp.stack([first_E, first_E + (count_E - 1) * rows], axis=1)
    at_ER = (tile_E2[..., None] + jnp.arange(rows)).reshape(len(sizes_E), -1)
    is_own_ER = (at_ER >= (end_E - sizes_E)[:, None]) & (at_ER < end_E[:, None])
    return jnp.where(is_own_ER.reshape(-1, 1), jnp.take(x_MK, at_ER.reshape(-1), axis=0, mode="clip"), 0)


def schedule(
    sizes_E: jax.Array, M: int, *, rows: int, columns: int, align: int, band: int
) -> tuple[jax.Array, jax.Array]:
    """Tiles in execution order, and their number.

    [tiles, 5]: group, first row of the tile, first and end row of the group, index of the column tile. A group is one
    band, or several of about `band` tiles.
    """
    E = len(sizes_E)
    first_E, count_E = spans(sizes_E, rows, align)
    end_E = jnp.cumsum(sizes_E.astype(jnp.int32))
    bands_E = jnp.maximum((count_E + band // 2) // band, 1)
    height_E = jnp.maximum(-(-count_E // bands_E), 1)
    below_E = jnp.cumsum(count_E) * columns
    number_T = jnp.arange((M + E * (rows + align - 2)) // rows * columns, dtype=jnp.int32)
    group_T = jnp.minimum(jnp.sum(number_T[:, None] >= below_E, axis=1, dtype=jnp.int32), E - 1)
    within_T = number_T - (below_E - count_E * columns)[group_T]
    row_T, column_T = tile_position(within_T, count_E[group_T], columns, height_E[group_T])
    row_T = first_E[group_T] + row_T * rows
    return jnp.stack([group_T, row_T, (end_E - sizes_E)[group_T], end_E[group_T], column_T], axis=1), below_E[-1:]


def tile_position(
    number: jax.Array, rows: int | jax.Array, columns: int, band: int | jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Row and column of a program: down the rows of a band, then to the next column."""
    size = band * columns
    first = jax.lax.div(number, size) * band
    height = jnp.minimum(rows - first, band)
    within = jax.lax.rem(number, size)
    return first + jax.lax.rem(within, height), jax.lax.div(within, height)


class Kernels(Protocol):
    """The two kernels with their static parameters; hashable, so that JAX can cache compiled programs."""

    def matmul(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
        """x times w [E, K, N], or [E, N, K] if transposed."""

    def weight_grad(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        """[E, K, N]: x^T times d_out over the rows of each group."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul_vjp(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    return kernels.matmul(x_MK, w_EKN, sizes_E, transposed=False)


def _forward(kernels: Kernels, x_MK: jax.Array, w_EKN: jax.Array, sizes_E: jax.Array) -> tuple[jax.Array, tuple]:
    return grouped_matmul_vjp(kernels, x_MK, w_EKN, sizes_E), (x_MK, w_EKN, sizes_E)


def _backward(kernels: Kernels, residuals: tuple, d_out_MN: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    x_MK, w_EKN, sizes_E = residuals
    return kernels.matmul(d_out_MN, w_EKN, sizes_E, transposed=True), kernels.weight_grad(x_MK, d_out_MN, sizes_E), None


grouped_matmul_vjp.defvjp(_forward, _backward)


class PairKernels(Kernels, Protocol):
    """Kernels of which one computes the gradient of rows that are multiplied by two matrices."""

    def matmul_sum(self, x: Pair, w: Pair, sizes_E: jax.Array) -> jax.Array:
        """[M, N]: the sum of x[0] times w[0] and x[1] times w[1], with x [M, K] and w [E, N, K]."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def grouped_matmul_pair_vjp(kernels: PairKernels, x_MK: jax.Array, w: Pair, sizes_E: jax.Array) -> Pair:
    """x times each of two matrices [E, K, N]."""
    first, second = (kernels.matmul(x_MK, w_EKN, sizes_E, transposed=False) for w_EKN in w)
    return first, second


def _pair_forward(kernels: PairKernels, x_MK: jax.Array, w: Pair, sizes_E: jax.Array) -> tuple[Pair, tuple]:
    return grouped_matmul_pair_vjp(kernels, x_MK, w, sizes_E), (x_MK, w, sizes_E)


def _pair_backward(kernels: PairKernels, residuals: tuple, d_out: Pair) -> tuple[jax.Array, Pair, None]:
    x_MK, w, sizes_E = residuals
    d_first, d_second = (kernels.weight_grad(x_MK, d_out_MN, sizes_E) for d_out_MN in d_out)
    return kernels.matmul_sum(d_out, w, sizes_E), (d_first, d_second), None


grouped_matmul_pair_vjp.defvjp(_pair_forward, _pair_backward)
