"""Split-K reduction with residual and norm, for GPUs, in Pallas for Triton; XLA would use two kernels.

A program handles one row, in registers. Shapes: P split-K parts, M rows, N features of a row.
"""

from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_linear.epilogue import NormParams
from maxhydra.kernels.tiles import power_of_two_divisor

# A row is loaded in few pieces of a power of two, all of which fit in registers.
LEAST_PIECE, MOST_NUMBERS = 256, 8192


def warps(N: int) -> int:
    """Measured on an H200 for 4 parts of 64 rows of 2,048, us: 2.17 with 16, 2.50 with 8, 2.58 with 4."""
    return 16 if power_of_two_divisor(N) >= 2048 else 8


def is_supported(N: int) -> bool:
    return power_of_two_divisor(N) >= LEAST_PIECE and N <= MOST_NUMBERS


def reduce_add_norm(
    parts_PMN: jax.Array, residual_MN: jax.Array, norm: NormParams, dtype: np.dtype, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: the residual + the sum of the parts, and the norm of that."""
    P, M, N = parts_PMN.shape
    specs = [pl.BlockSpec((P, None, N), lambda m: (0, m, 0)), pl.BlockSpec((None, N), lambda m: (m, 0))]
    out = jax.ShapeDtypeStruct((M, N), dtype)
    return residual_and_norm(
        _read_sum, [parts_PMN, residual_MN], specs, out, norm, interpret=interpret, name="split_k_reduce_norm"
    )


def _read_sum(parts_ref: Any, residual_ref: Any, slices: list[Any]) -> list[jax.Array]:
    parts = [[parts_ref[part, piece_slice] for part in range(parts_ref.shape[0])] for piece_slice in slices]
    residuals = [residual_ref[piece_slice].astype(jnp.float32) for piece_slice in slices]
    return [sum(terms[1:], terms[0]) + residual for terms, residual in zip(parts, residuals, strict=True)]


def residual_and_norm(
    read: Callable[..., list[jax.Array]],
    inputs: Sequence[jax.Array],
    specs: Sequence[pl.BlockSpec],
    out: jax.ShapeDtypeStruct,
    norm: NormParams,
    *,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """The residual stream, which read(*input refs, slices) returns in pieces, one row per program, and its norm."""
    M, N = out.shape
    row = pl.BlockSpec((None, N), lambda m: (m, 0))
    out_MN, normed_MN = pl.pallas_call(
        partial(_kernel, read=read, offset=norm.offset, eps=norm.eps),
        grid=(M,),
        in_specs=[*specs, pl.BlockSpec((N,), lambda m: (0,))],
        out_specs=[row, row],
        out_shape=[out, out],
        compiler_params=plt.CompilerParams(num_warps=warps(N), num_stages=1),
        interpret=interpret,
        name=name,
    )(*inputs, norm.scale_K)
    return out_MN, normed_MN


def _kernel(*refs: Any, read: Callable[..., list[jax.Array]], offset: float, eps: float) -> None:
    """All loads are issued before the first store, since loads do not overtake stores."""
    *input_refs, scale_ref, out_ref, normed_ref = refs
    slices = _pieces(out_ref.shape[0])
    scales = [scale_ref[piece_slice].astype(jnp.float32) + offset for piece_slice in slices]
    outs = [piece.astype(out_ref.dtype) for piece in read(*input_refs, slices)]
    for piece_slice, out, normed in zip(slices, outs, _normed(outs, scales, eps), strict=True):
        out_ref[piece_slice] = out
        normed_ref[piece_slice] = normed


def _pieces(N: int) -> list[Any]:
    """Slices of a row."""
    size = power_of_two_divisor(N)
    return [pl.ds(start, size) for start in range(0, N, size)]


def _normed(pieces: list[jax.Array], scales: list[jax.Array], eps: float) -> list[jax.Array]:
    """The norm of a row, in its dtype."""
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = reduce(jnp.add, (jnp.sum(piece * piece) for piece in wide))
    factor = jax.lax.rsqrt(squares / sum(piece.size for piece in pieces) + eps)
    return [(piece * factor * scale).astype(pieces[0].dtype) for piece, scale in zip(wide, scales, strict=True)]
