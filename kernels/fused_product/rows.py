"""The end of a product whose inputs were parted, for GPUs, in Pallas for Triton: the sum of the parts and the stream it
is added to, and the norm of that, of which the compiler would make two kernels. A program has a row, in registers.

Shapes: P parts, M rows, N numbers of a row.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_product.around import Norm
from maxhydra.kernels.fused_product.sizes import power_of_two_in

# A row comes in pieces of a power of two, few enough of them and all in registers.
LEAST_PIECE, MOST_NUMBERS = 256, 8192
WARPS = 8


def can_serve(N: int) -> bool:
    return power_of_two_in(N) >= LEAST_PIECE and N <= MOST_NUMBERS


def summed(
    parts_PMN: jax.Array, onto_MN: jax.Array, norm: Norm, dtype: np.dtype, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: onto with the sum of the parts, and the norm of that."""
    P, M, N = parts_PMN.shape
    row = pl.BlockSpec((None, N), lambda m: (m, 0))
    stream_MN, normed_MN = pl.pallas_call(
        partial(_kernel, offset=norm.offset, eps=norm.eps),
        grid=(M,),
        in_specs=[
            pl.BlockSpec((P, None, N), lambda m: (0, m, 0)),
            row,
            pl.BlockSpec((N,), lambda m: (0,)),
        ],
        out_specs=[row, row],
        out_shape=[jax.ShapeDtypeStruct((M, N), dtype)] * 2,
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpret,
        name="summed_rows",
    )(parts_PMN, onto_MN, norm.scale_K)
    return stream_MN, normed_MN


def _kernel(
    parts_ref: Any, onto_ref: Any, scale_ref: Any, stream_ref: Any, normed_ref: Any, *, offset: float, eps: float
) -> None:
    P, N = parts_ref.shape
    size = power_of_two_in(N)
    places, pieces = [pl.ds(start, size) for start in range(0, N, size)], []
    for place in places:
        wide = sum((parts_ref[part, place] for part in range(1, P)), parts_ref[0, place])
        stream = (wide + onto_ref[place].astype(jnp.float32)).astype(stream_ref.dtype)
        stream_ref[place] = stream
        pieces.append(stream.astype(jnp.float32))
    squares = sum((jnp.sum(piece * piece) for piece in pieces[1:]), jnp.sum(pieces[0] * pieces[0]))
    factor = jax.lax.rsqrt(squares / N + eps)
    for place, piece in zip(places, pieces, strict=True):
        scale = scale_ref[place].astype(jnp.float32) + offset
        normed_ref[place] = (piece * factor * scale).astype(normed_ref.dtype)
