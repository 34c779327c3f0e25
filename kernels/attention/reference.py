"""The oracle: attention as defined in the paper (Vaswani et al., 2017), in float32, with every array materialised."""

import jax
import jax.numpy as jnp

from maxhydra.kernels.attention.spec import Request, TokenInfo, visible


def attention(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    request: Request,
    tokens: TokenInfo,
    sinks_N: jax.Array | None,
) -> jax.Array:
    """softmax(scale * q k^T) v, with each key and value head repeated for the query heads that share it.

    A sink is one extra key with this logit and a value of zero.
    """
    group = q_BTNH.shape[2] // k_BSKH.shape[2]
    k_BSNH = jnp.repeat(k_BSKH, group, axis=2).astype(jnp.float32)
    v_BSNH = jnp.repeat(v_BSKH, group, axis=2).astype(jnp.float32)
    logits_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH.astype(jnp.float32), k_BSNH, precision="highest") * request.scale
    if request.softcap is not None:
        logits_BNTS = request.softcap * jnp.tanh(logits_BNTS / request.softcap)

    mask_BTS = visible(request, tokens, queries=range(q_BTNH.shape[1]), keys=range(k_BSKH.shape[1]))
    mask_BNTS = jnp.ones((), bool) if mask_BTS is None else mask_BTS[:, None]
    # The lowest finite number instead of -inf: a row without keys must give zeros, and -inf - -inf is NaN.
    logits_BNTS = jnp.where(mask_BNTS, logits_BNTS, jnp.finfo(jnp.float32).min)
    num_keys = logits_BNTS.shape[-1]
    if sinks_N is not None:
        sinks_BNT1 = jnp.broadcast_to(sinks_N[:, None, None].astype(jnp.float32), (*logits_BNTS.shape[:-1], 1))
        logits_BNTS = jnp.concatenate([logits_BNTS, sinks_BNT1], axis=-1)
    weights_BNTS = jnp.where(mask_BNTS, jax.nn.softmax(logits_BNTS, axis=-1)[..., :num_keys], 0.0)
    return jnp.einsum("BNTS,BSNH->BTNH", weights_BNTS, v_BSNH, precision="highest").astype(q_BTNH.dtype)
