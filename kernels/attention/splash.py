"""Splash attention for TPUs: JAX's flash attention (Dao, 2023) in Pallas, which skips blocks that the mask hides.

Its segment ids have no padding value: outputs of segment 0 are set to zero here, which also zeroes their gradients.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks

from maxhydra.kernels.attention.spec import CHECKPOINT_NAME, Request, TokenInfo

# Queries and keys of a block: the largest that divides the length. Blocks of 512 with heads of up to 256 fit the 16 MiB
# of vector memory that XLA grants a kernel on every TPU, also in the backward pass. Not measured: no TPU was available.
BLOCKS = (512, 256, 128)
# The kernels take whole vector registers of tokens.
LENGTH_MULTIPLE = min(BLOCKS)


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
    *,
    interpret: bool = False,
) -> jax.Array:
    shape = q_BTNH.shape[1], k_BSKH.shape[1]
    run = kernel.make_splash_mha_single_device(
        mask=masks.MultiHeadMask([_mask(request, shape)] * q_BTNH.shape[2]),
        block_sizes=_blocks(*shape),
        attn_logits_soft_cap=request.softcap,
        residual_checkpoint_name=CHECKPOINT_NAME,
        interpret=interpret,
    )
    # The kernel has no scale argument.
    scaled = (q_BTNH.astype(jnp.float32) * request.scale).astype(q_BTNH.dtype)
    q_BNTH, k_BKSH, v_BKSH = (x.swapaxes(1, 2) for x in (scaled, k_BSKH, v_BSKH))
    if tokens.q_segments_BT is None or tokens.kv_segments_BS is None:
        return jax.vmap(lambda q, k, v: run(q, k, v, None, sinks_N))(q_BNTH, k_BKSH, v_BKSH).swapaxes(1, 2)
    segments = kernel.SegmentIds(tokens.q_segments_BT, tokens.kv_segments_BS)
    out_BNTH = jax.vmap(lambda q, k, v, segments: run(q, k, v, segments, sinks_N))(q_BNTH, k_BKSH, v_BKSH, segments)
    return jnp.where(tokens.q_segments_BT[:, :, None, None] != 0, out_BNTH.swapaxes(1, 2), 0)


class _ChunkedMask(masks.ChunkedCausalMask):
    """JAX's mask with truncating instead of floor division, which in Pallas needs the chip's description.

    The results are equal because indices are never negative.
    """

    def __init__(self, shape: tuple[int, int], chunk: int):
        super().__init__(shape, chunk)
        self.mask_function = self._is_visible

    def _is_visible(self, q: Any, k: Any) -> Any:
        divide = np.floor_divide if isinstance(q, np.ndarray) else jax.lax.div
        return (divide(q, self.chunk_size) == divide(k, self.chunk_size)) & (q >= k)


def _mask(request: Request, shape: tuple[int, int]) -> masks.Mask:
    if request.window is not None:
        return masks.LocalMask(shape, (request.window - 1, 0), request.offset)
    if request.chunk is not None:
        return _ChunkedMask(shape, request.chunk)
    return masks.CausalMask(shape, request.offset) if request.causal else masks.FullMask(shape)


def _blocks(queries: int, keys: int) -> kernel.BlockSizes:
    q, kv = (next(size for size in BLOCKS if length % size == 0) for length in (queries, keys))
    return kernel.BlockSizes(block_q=q, block_kv=kv, block_q_dkv=q, block_kv_dkv=kv, block_q_dq=q, block_kv_dq=kv)
