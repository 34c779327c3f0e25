"""RMSNorm and its gradient for GPUs, in Pallas for Triton.

A program processes a few rows in sequence and loads the next one while it computes. A row is read once and stays in
registers, in pieces of a power of two, as Triton requires. The backward pass also adds the gradient of the residual
stream, and each program writes a sum over its rows for the gradient of the scale.

Shapes: M rows, D features of a row, P programs.
"""

import dataclasses
import math
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.tiles import Sizes, candidates, override_sizes


class Tile(NamedTuple):
    """Rows and warps of a program."""

    rows: int
    warps: int


class Tiles(NamedTuple):
    forward: Tile
    backward: Tile


# The fastest measured on an H200 with rows of 2,048 and 3,072 features.
MEASURED = Tiles(Tile(16, 4), Tile(32, 4))
# Candidates for other rows and GPUs.
CANDIDATE_TILES = {
    "forward": (Tile(4, 4), Tile(8, 4), Tile(8, 8), Tile(32, 4)),
    "backward": (Tile(8, 4), Tile(16, 4), Tile(16, 8), Tile(64, 4)),
}
# The row length must be a multiple of the first, so that its pieces are few and every warp has a share of each; the
# number of rows must be a multiple of the second.
DIM_MULTIPLE, ROW_MULTIPLE = 256, 16
# The largest piece, and the longest row that fits in registers.
MAX_PIECE, MAX_DIM = 4096, 8192
# With fewer rows, as in decoding, XLA fuses the norm with the operations before or after it.
MIN_ROWS = 512


@dataclasses.dataclass(frozen=True)
class KernelParams:
    """Static parameters of the kernels."""

    eps: float
    dtype: Any
    """Dtype of the normalised output."""
    tiles: Tiles
    interpret: bool


def tile_extents(rows: int) -> dict[str, int]:
    """The extent that each tile size must divide, by name."""
    return {"forward.rows": rows, "backward.rows": rows}


def candidate_tiles(rows: int) -> dict[str, list[dict[str, int]]]:
    """Candidate tile sizes for each kernel."""
    return candidates(CANDIDATE_TILES, MEASURED, tile_extents(rows))


def rms_norm(
    x_MD: jax.Array,
    scale_D: jax.Array,
    *,
    eps: float,
    dtype: Any,
    tiles: Tiles = MEASURED,
    sizes: Sizes = (),
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    return _rms_norm(KernelParams(eps, jnp.dtype(dtype), override_sizes(tiles, sizes), interpret), x_MD, scale_D)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rms_norm(params: KernelParams, x_MD: jax.Array, scale_D: jax.Array) -> tuple[jax.Array, jax.Array]:
    M, D = x_MD.shape
    tile = params.tiles.forward
    rows = math.gcd(tile.rows, M)
    normed_MD = pl.pallas_call(
        partial(_forward_kernel, eps=params.eps, rows=rows),
        grid=(M // rows,),
        out_shape=jax.ShapeDtypeStruct((M, D), params.dtype),
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=params.interpret,
        name="rms_norm",
    )(x_MD, scale_D)
    return x_MD, normed_MD


def _forward(params: KernelParams, x_MD: jax.Array, scale_D: jax.Array) -> tuple[tuple[jax.Array, jax.Array], tuple]:
    return _rms_norm(params, x_MD, scale_D), (x_MD, scale_D)


def _backward(
    params: KernelParams, residuals: tuple, cotangents: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    x_MD, scale_D = residuals
    d_stream_MD, d_normed_MD = cotangents
    M, D = x_MD.shape
    tile = params.tiles.backward
    rows = math.gcd(tile.rows, M)
    d_x_MD, d_scale_PD = pl.pallas_call(
        partial(_backward_kernel, eps=params.eps, rows=rows),
        grid=(M // rows,),
        out_shape=[jax.ShapeDtypeStruct((M, D), x_MD.dtype), jax.ShapeDtypeStruct((M // rows, D), jnp.float32)],
        compiler_params=plt.CompilerParams(num_warps=tile.warps, num_stages=1),
        interpret=params.interpret,
        name="rms_norm_backward",
    )(x_MD, scale_D, d_stream_MD, d_normed_MD)
    return d_x_MD, jnp.sum(d_scale_PD, axis=0).astype(scale_D.dtype)


_rms_norm.defvjp(_forward, _backward)


def _pieces(D: int) -> list[Any]:
    """Slices of a row, each of a power-of-two length."""
    size = math.gcd(D, MAX_PIECE)
    return [pl.ds(start, size) for start in range(0, D, size)]


def _read(ref: Any, row: jax.Array, pieces: list[Any]) -> list[jax.Array]:
    return [ref[row, piece] for piece in pieces]


def _wide(parts: list[jax.Array]) -> list[jax.Array]:
    return [part.astype(jnp.float32) for part in parts]


def _dot(a: list[jax.Array], b: list[jax.Array]) -> jax.Array:
    """Dot product over a row."""
    total = jnp.sum(a[0] * b[0])
    for a_piece, b_piece in zip(a[1:], b[1:], strict=True):
        total = total + jnp.sum(a_piece * b_piece)
    return total


def _forward_kernel(x_ref: Any, scale_ref: Any, out_ref: Any, *, eps: float, rows: int) -> None:
    D = x_ref.shape[1]
    pieces = _pieces(D)
    scale = [scale_ref[piece].astype(jnp.float32) for piece in pieces]
    first = pl.program_id(0) * rows

    def process_row(i: jax.Array, read: list[jax.Array]) -> list[jax.Array]:
        row = first + i
        next_row = _read(x_ref, jnp.minimum(row + 1, first + rows - 1), pieces)
        x = _wide(read)
        inverse = jax.lax.rsqrt(_dot(x, x) / D + eps)
        for piece, part, factor in zip(pieces, x, scale, strict=True):
            out_ref[row, piece] = (part * inverse * factor).astype(out_ref.dtype)
        return next_row

    jax.lax.fori_loop(0, rows, process_row, _read(x_ref, first, pieces))


def _backward_kernel(
    x_ref: Any,
    scale_ref: Any,
    stream_ref: Any,
    normed_ref: Any,
    d_x_ref: Any,
    d_scale_ref: Any,
    *,
    eps: float,
    rows: int,
) -> None:
    """With u = x / rms and g = d_normed * scale: d_x = d_stream + (g - u * mean(g * u)) / rms."""
    D = x_ref.shape[1]
    pieces = _pieces(D)
    scale = [scale_ref[piece].astype(jnp.float32) for piece in pieces]
    program = pl.program_id(0)
    first = program * rows

    def read(row: jax.Array) -> list[list[jax.Array]]:
        return [_read(ref, row, pieces) for ref in (x_ref, normed_ref, stream_ref)]

    def process_row(i: jax.Array, carry: tuple[list[list[jax.Array]], list[jax.Array]]) -> Any:
        current, d_scale = carry
        row = first + i
        next_row = read(jnp.minimum(row + 1, first + rows - 1))
        x, d_normed, d_stream = map(_wide, current)
        g = [part * factor for part, factor in zip(d_normed, scale, strict=True)]
        inverse = jax.lax.rsqrt(_dot(x, x) / D + eps)
        slope = _dot(g, x) * inverse * inverse / D
        for n, piece in enumerate(pieces):
            d_x_ref[row, piece] = (d_stream[n] + (g[n] - x[n] * slope) * inverse).astype(d_x_ref.dtype)
        return next_row, [
            total + part * x_piece * inverse for total, part, x_piece in zip(d_scale, d_normed, x, strict=True)
        ]

    zeros = [jnp.zeros((piece.size,), jnp.float32) for piece in pieces]
    _, d_scale = jax.lax.fori_loop(0, rows, process_row, (read(first), zeros))
    for piece, total in zip(pieces, d_scale, strict=True):
        d_scale_ref[program, piece] = total
