"""What a step begins with, for GPUs, in Pallas for Triton: rows of a table, and the norm of each, of which the compiler
would make two kernels. A program has a row, in registers.

Shapes: V rows of the table, N numbers of a row, M tokens.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from maxhydra.kernels.fused_product.around import Norm
from maxhydra.kernels.fused_product.few_rows import MOST_ROWS
from maxhydra.kernels.fused_product.rows import can_serve as is_in_pieces
from maxhydra.kernels.fused_product.rows import normed_pieces, pieces_of, warps


def can_serve(M: int, N: int, dtype: str) -> bool:
    """Whether the kernel takes these sizes on the devices there are, and the products that follow want a norm."""
    return jax.default_backend() == "gpu" and 1 < M <= MOST_ROWS and is_in_pieces(N) and dtype == "bfloat16"


def looked_up(table_VN: jax.Array, tokens_M: jax.Array, norm: Norm, *, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: the tokens' rows, no numbers where there is none, and the norm of each."""
    (V, N), (M,) = table_VN.shape, tokens_M.shape
    row, shape = pl.BlockSpec((None, N), lambda m: (m, 0)), jax.ShapeDtypeStruct((M, N), table_VN.dtype)
    stream_MN, normed_MN = pl.pallas_call(
        partial(_kernel, offset=norm.offset, eps=norm.eps),
        grid=(M,),
        in_specs=[
            pl.BlockSpec((V, N), lambda m: (0, 0)),
            pl.BlockSpec((None,), lambda m: (m,)),
            pl.BlockSpec((N,), lambda m: (0,)),
        ],
        out_specs=[row, row],
        out_shape=[shape, shape],
        compiler_params=plt.CompilerParams(num_warps=warps(N), num_stages=1),
        interpret=interpret,
        name="first_rows",
    )(table_VN, tokens_M, norm.scale_K)
    return stream_MN, normed_MN


def _kernel(
    table_ref: Any, token_ref: Any, scale_ref: Any, stream_ref: Any, normed_ref: Any, *, offset: float, eps: float
) -> None:
    (V, N), token = table_ref.shape, token_ref[...]
    is_there, places = (token >= 0) & (token < V), pieces_of(N)
    scales = [scale_ref[place].astype(jnp.float32) + offset for place in places]
    found = [table_ref[jnp.where(is_there, token, 0), place] for place in places]
    streams = [jnp.where(is_there, piece, jnp.nan).astype(stream_ref.dtype) for piece in found]
    for place, stream, normed in zip(places, streams, normed_pieces(streams, scales, eps), strict=True):
        stream_ref[place] = stream
        normed_ref[place] = normed
