"""Embedding lookup with the norm of each row, for GPUs, in Pallas for Triton; XLA would use two kernels.

A program handles one row, in registers. Shapes: V rows of the table, N features of a row, M tokens.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from maxhydra.kernels.fused_linear.epilogue import NormParams
from maxhydra.kernels.fused_linear.small_batch import MOST_ROWS
from maxhydra.kernels.fused_linear.split_k_reduce import is_supported as is_in_pieces
from maxhydra.kernels.fused_linear.split_k_reduce import residual_and_norm


def is_supported(M: int, N: int, dtype: str) -> bool:
    """Whether the kernel supports these sizes on the current devices, and the next kernels take a computed norm."""
    return jax.default_backend() == "gpu" and 1 < M <= MOST_ROWS and is_in_pieces(N) and dtype == "bfloat16"


def embed_and_norm(
    table_VN: jax.Array, tokens_M: jax.Array, norm: NormParams, *, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """[M, N] twice: the tokens' rows, NaN for tokens out of range, and the norm of each."""
    specs = [pl.BlockSpec(table_VN.shape, lambda m: (0, 0)), pl.BlockSpec((None,), lambda m: (m,))]
    stream = jax.ShapeDtypeStruct((tokens_M.size, table_VN.shape[1]), table_VN.dtype)
    return residual_and_norm(
        _read_rows, [table_VN, tokens_M], specs, stream, norm, interpret=interpret, name="embed_norm"
    )


def _read_rows(table_ref: Any, token_ref: Any, slices: list[Any]) -> list[jax.Array]:
    token = token_ref[...]
    is_valid = (token >= 0) & (token < table_ref.shape[0])
    pieces = [table_ref[jnp.where(is_valid, token, 0), piece_slice] for piece_slice in slices]
    return [jnp.where(is_valid, piece, jnp.nan) for piece in pieces]
