"""Attention to one block of keys at a time, and the sum of its parts by their log-sum-exp.

A `BlockKernel` computes one block. Its backward pass takes each query's sum of exponentials over all blocks, so that
the gradients of the blocks only have to be added.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.blocks import LOG2E, LOWEST, Inputs, Rows
from maxhydra.kernels.attention.spec import Request


class BlockKernel(NamedTuple):
    """Forward and backward pass of attention to one block of keys, without sinks."""

    forward: Callable[[Request, Inputs], tuple[jax.Array, jax.Array]]
    """The outputs [B, T, N, V], and log2 of the sum of each query's exponentials, [B, N, T]."""
    backward: Callable[[Request, Inputs, Rows], tuple[jax.Array, jax.Array, jax.Array]]
    """Gradients of queries, keys and values, for rows of all blocks."""


class Partial(NamedTuple):
    """Attention to some of the keys, in float32."""

    out_BTNV: jax.Array
    total_BNT: jax.Array
    """log2 of the sum of the exponentials."""

    @classmethod
    def empty(cls, inputs: Inputs) -> "Partial":
        """Attention to no key but the sinks, which have no value."""
        B, T, N, _ = inputs.q_BTNH.shape
        total_BNT = jnp.full((B, N, T), LOWEST, jnp.float32)
        if inputs.sinks_N is not None:
            total_BNT = jnp.broadcast_to(inputs.sinks_N.astype(jnp.float32)[:, None] * LOG2E, total_BNT.shape)
        return cls(jnp.zeros((B, T, N, inputs.v_BSKH.shape[-1]), jnp.float32), total_BNT)

    def merge(self, other: "Partial") -> "Partial":
        """Attention to the keys of both."""
        total_BNT = jnp.logaddexp2(self.total_BNT, other.total_BNT)
        shares = (jnp.exp2(part.total_BNT - total_BNT).swapaxes(1, 2)[..., None] for part in (self, other))
        out_BTNV = sum(share * part.out_BTNV for share, part in zip(shares, (self, other), strict=True))
        return Partial(jnp.asarray(out_BTNV), total_BNT)
