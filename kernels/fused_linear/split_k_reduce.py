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

from maxhydra.kernels.fused_linear.epilogue import Norm
from maxhydra.kernels.tiles import power_of_two_divisor

# A row is loaded in few pieces of a power of two, all of which fit in registers.
LEAST_PIECE, MOST_NUMBERS = 256, 8192


def warps(N: int) -> int:
    """Measured on an H200 for 4 parts of 64 rows of 2,048, us: 2.17 with 16, 2.50 with 8, 2.58 with 4."""
    return 16 if power_of_two_divisor(N) >= 2048 else 8


def can_serve(N: int) -> bool:
    return power_of_two_divisor(N) >= LEAST_PIECE and N <= MOST_NUMBERS


def summed(
    parts_PMN: jax.Array, onto_MN: jax.Array, norm: Norm, dtype: np.dtype, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: onto + the sum of the parts, and the norm of that."""
    P, M, N = parts_PMN.shape
    specs = [pl.BlockSpec((P, None, N), lambda m: (0, m, 0)), pl.BlockSpec((None, N), lambda m: (m, 0))]
    stream = jax.ShapeDtypeStruct((M, N), dtype)
    return with_norm(_added, [parts_PMN, onto_MN], specs, stream, norm, interpret=interpret, name="split_k_reduce_norm")


def _added(parts_ref: Any, onto_ref: Any, places: list[Any]) -> list[jax.Array]:
    parts = [[parts_ref[part, place] for part in range(parts_ref.shape[0])] for place in places]
    onto = [onto_ref[place].astype(jnp.float32) for place in places]
    return [sum(some[1:], some[0]) + old for some, old in zip(parts, onto, strict=True)]


def with_norm(
    read: Callable[..., list[jax.Array]],
    given: Sequence[jax.Array],
    specs: Sequence[pl.BlockSpec],
    stream: jax.ShapeDtypeStruct,
    norm: Norm,
    *,
    interpret: bool,
    name: str,
) -> tuple[jax.Array, jax.Array]:
    """The residual stream, which read(*input refs, slices) returns in pieces, one row per program, and its norm."""
    M, N = stream.shape
    row = pl.BlockSpec((None, N), lambda m: (m, 0))
    stream_MN, normed_MN = pl.pallas_call(
        partial(_kernel, read=read, offset=norm.offset, eps=norm.eps),
        grid=(M,),
        in_specs=[*specs, pl.BlockSpec((N,), lambda m: (0,))],
        out_specs=[row, row],
        out_shape=[stream, stream],
        compiler_params=plt.CompilerParams(num_warps=warps(N), num_stages=1),
        interpret=interpret,
        name=name,
    )(*given, norm.scale_K)
    return stream_MN, normed_MN


def _kernel(*refs: Any, read: Callable[..., list[jax.Array]], offset: float, eps: float) -> None:
    """All loads are issued before the first store, since loads do not overtake stores."""
    *given_refs, scale_ref, stream_ref, normed_ref = refs
    places = _pieces(stream_ref.shape[0])
    scales = [scale_ref[place].astype(jnp.float32) + offset for place in places]
    streams = [piece.astype(stream_ref.dtype) for piece in read(*given_refs, places)]
    for place, stream, normed in zip(places, streams, _normed(streams, scales, eps), strict=True):
        stream_ref[place] = stream
        normed_ref[place] = normed


def _pieces(N: int) -> list[Any]:
    """Slices of a row."""
    size = power_of_two_divisor(N)
    return [pl.ds(start, size) for start in range(0, N, size)]


def _normed(pieces: list[jax.Array], scales: list[jax.Array], eps: float) -> list[jax.Array]:
    """The norm of a row, in its dtype."""
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = reduce(jnp.add, (jnp.sum(piece * piece) for piece in wide))
    factor = jax.lax.rsqrt(squares / sum(piece.size for piece in pieces) + eps)
    return [(one * factor * scale).astype(pieces[0].dtype) for one, scale in zip(wide, scales, strict=True)]
