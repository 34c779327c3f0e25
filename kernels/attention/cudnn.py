"""cuDNN flash attention (Dao, 2023) on NVIDIA GPUs, through `jax.nn.dot_product_attention`."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.spec import Request, TokenInfo, same_segment


def attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, request: Request, tokens: TokenInfo, sinks_N: None
) -> jax.Array:
    """Use cuDNN's causal and window masks, which skip hidden blocks; segments are passed as a mask [B, 1, T, S].

    cuDNN turns the mask into a bias of -2^41 instead of -inf, so a padding query, which sees no key, would return the
    mean of the values. Its output is set to zero here, which also zeroes its gradient.
    """
    has_segments = tokens.q_segments_BT is not None
    queries, keys = range(q_BTNH.shape[1]), range(k_BSKH.shape[1])
    out_BTNH = jax.nn.dot_product_attention(
        q_BTNH,
        k_BSKH,
        v_BSKH,
        mask=same_segment(tokens, queries=queries, keys=keys)[:, None] if has_segments else None,
        scale=request.scale,
        is_causal=request.causal,
        local_window_size=None if request.window is None else (request.window - 1, 0),
        implementation="cudnn",
    )
    if tokens.q_segments_BT is None:
        return out_BTNH
    return jnp.where(tokens.q_segments_BT[:, :, None, None] != 0, out_BTNH, 0)
