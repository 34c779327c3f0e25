"""Grouped matmul for GPUs in Pallas for Triton: each group of rows is multiplied by its own matrix.

Rows are split into tiles, and a tile that two groups share is computed once for each of them; precomputed tables map
tiles to groups. The gradient of the matrices sums over the rows of each group instead.

Shapes: M rows, E groups, K inputs, N outputs; in the gradient of x, outputs play the role of inputs.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.grouped_matmul.tiles import edges, grouped_matmul_vjp, spans, tile_position, tile_table
from maxhydra.kernels.tiles import Sizes, candidates, override_sizes


class Tile(NamedTuple):
    """Tile of a program, and its launch parameters."""

    rows: int
    columns: int
    contracted: int
    """Terms of the sum per step."""
    warps: int
    stages: int
    band: int
    """Row tiles that sweep the columns together, so that both operands stay in the L2 cache."""


class Tiles(NamedTuple):
    """Tiles of the two kernels: matmuls, and the sums over rows that are the gradient of the matrices."""

    forward: Tile
    weight_grad: Tile


# The fastest measured on an H200 with the shapes of Mixtral 8x7B.
MEASURED = Tiles(Tile(128, 256, 64, 8, 3, 8), Tile(128, 256, 64, 8, 4, 8))
# Candidates for other shapes and GPUs.
CANDIDATE_TILES = (
    Tile(128, 256, 64, 8, 3, 8),
    Tile(128, 256, 64, 8, 4, 8),
    Tile(128, 128, 64, 8, 4, 8),
    Tile(128, 128, 64, 4, 4, 8),
    Tile(64, 256, 64, 4, 4, 16),
    Tile(128, 256, 32, 8, 4, 8),
)
# Tiles are reduced to divisors of the sizes; smaller ones than this underuse the tensor cores.
MULTIPLE = 128


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    tiles: Tiles
    interpret: bool

    def matmul(self, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
        return _matmul(self, x_MK, w, sizes_E, transposed=transposed)

    def weight_grad(self, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
        return _weight_grad(self, x_MK, d_out_MN, sizes_E)


def tile_extents(rows: int, inputs: int, outputs: int) -> dict[str, int]:
    """The extent that each tile size must divide, by name; the gradient of x swaps inputs and outputs."""
    both = math.gcd(inputs, outputs)
    return {
        "forward.rows": rows,
        "forward.columns": both,
        "forward.contracted": both,
        "weight_grad.rows": inputs,
        "weight_grad.columns": outputs,
        "weight_grad.contracted": rows,
    }


def candidate_tiles(rows: int, inputs: int, outputs: int) -> dict[str, list[dict[str, int]]]:
    """Candidate tile sizes for each kernel."""
    return candidates(
        {"forward": CANDIDATE_TILES, "weight_grad": CANDIDATE_TILES}, MEASURED, tile_extents(rows, inputs, outputs)
    )


def grouped_matmul(
    x_MK: jax.Array,
    w_EKN: jax.Array,
    sizes_E: jax.Array,
    *,
    tiles: Tiles = MEASURED,
    sizes: Sizes = (),
    interpret: bool = False,
) -> jax.Array:
    """Rows of no group give zeros."""
    return grouped_matmul_vjp(KernelParams(override_sizes(tiles, sizes), interpret), x_MK, w_EKN, sizes_E)


def _matmul(params: KernelParams, x_MK: jax.Array, w: jax.Array, sizes_E: jax.Array, *, transposed: bool) -> jax.Array:
    """x times w [E, K, N], or [E, N, K] if transposed."""
    (M, K), E = x_MK.shape, w.shape[0]
    N = w.shape[1] if transposed else w.shape[2]
    tile = params.tiles.forward
    C, D = math.gcd(tile.rows, M), math.gcd(tile.columns, N)
    tiles = M // C + E
    return pl.pallas_call(
        partial(
            _matmul_kernel,
            tile=tile._replace(rows=C, columns=D, contracted=math.gcd(tile.contracted, K)),
            transposed=transposed,
        ),
        grid=(tiles * (N // D),),
        out_shape=jax.ShapeDtypeStruct((M, N), x_MK.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=params.interpret,
        name="grouped_matmul",
    )(tile_table(sizes_E, M, C), x_MK, w)


def _matmul_kernel(tiles_ref: Any, x_ref: Any, w_ref: Any, out_ref: Any, *, tile: Tile, transposed: bool) -> None:
    (_, K), (E, *_), N = x_ref.shape, w_ref.shape, out_ref.shape[1]
    t, column = tile_position(pl.program_id(0), tiles_ref.shape[0], N // tile.columns, tile.band)
    group, block, first, end = (tiles_ref[t, i] for i in range(4))
    rows, columns = pl.ds(block * tile.rows, tile.rows), pl.ds(column * tile.columns, tile.columns)

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        part = pl.ds(step * tile.contracted, tile.contracted)
        w = w_ref[group, columns, part].T if transposed else w_ref[group, part, columns]
        return sums + jnp.dot(x_ref[rows, part], w, preferred_element_type=jnp.float32)

    steps = jnp.where((group < E) & (first < end), jnp.int32(K // tile.contracted), 0)
    sums = jax.lax.fori_loop(0, steps, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    row = block * tile.rows + jnp.arange(tile.rows)
    is_own = ((row >= first) & (row < end))[:, None]
    plt.store(out_ref.at[rows, columns], sums.astype(out_ref.dtype), mask=is_own)


def _weight_grad(params: KernelParams, x_MK: jax.Array, d_out_MN: jax.Array, sizes_E: jax.Array) -> jax.Array:
    """[E, K, N]: x^T times d_out over the rows of each group.

    The first and the last tile of a group may contain rows of other groups. They are read from a copy in which those
    rows are zero, so that a single loop over the tiles of a group needs no mask.
    """
    (M, K), N, E = x_MK.shape, d_out_MN.shape[1], len(sizes_E)
    tile = params.tiles.weight_grad
    C, D, S = math.gcd(tile.rows, K), math.gcd(tile.columns, N), math.gcd(tile.contracted, M)
    x = jnp.concatenate([x_MK, edges(x_MK, sizes_E, S, S)])
    first_E, count_E = spans(sizes_E, S, S)
    return pl.pallas_call(
        partial(_weight_grad_kernel, tile=tile._replace(rows=C, columns=D, contracted=S), tiles=M // S),
        grid=((K // C) * (N // D), E),
        out_shape=jax.ShapeDtypeStruct((E, K, N), x_MK.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=tile.stages),
        interpret=params.interpret,
        name="grouped_matmul_weight_grad",
    )(jnp.stack([first_E // S, count_E], axis=1), x, d_out_MN)


def _weight_grad_kernel(groups_ref: Any, x_ref: Any, d_out_ref: Any, out_ref: Any, *, tile: Tile, tiles: int) -> None:
    K, N = out_ref.shape[1:]
    group = pl.program_id(1)
    row, column = tile_position(pl.program_id(0), K // tile.rows, N // tile.columns, tile.band)
    down, across = pl.ds(row * tile.rows, tile.rows), pl.ds(column * tile.columns, tile.columns)
    first, count = groups_ref[group, 0], groups_ref[group, 1]
    edge = tiles + 2 * group

    def add(step: jax.Array, sums: jax.Array) -> jax.Array:
        index = jnp.where(step == 0, edge, jnp.where(step == count - 1, edge + 1, first + step))
        part = pl.ds(index * tile.contracted, tile.contracted)
        d_out = d_out_ref[pl.ds((first + step) * tile.contracted, tile.contracted), across]
        return sums + jnp.dot(x_ref[part, down].T, d_out, preferred_element_type=jnp.float32)

    sums = jax.lax.fori_loop(0, count, add, jnp.zeros((tile.rows, tile.columns), jnp.float32))
    out_ref[group, down, across] = sums.astype(out_ref.dtype)
