"""QK-Clip (Kimi K2, 2025): after an optimizer step, rescale the query and key projections of heads with large logits.

A head whose largest attention logit S of a step exceeds the threshold t gets the factor g = t / S on its logits. Query
and key projections of the head take sqrt(g) each. A key that other heads share is not changed, and the queries that
attend to it take all of g: the rotary part of latent attention, and the keys of grouped-query attention.

N query heads, H head size; weights may have leading axes of stacked layers.
"""

from typing import Any

import jax
import jax.numpy as jnp

# Aux output of attention: the largest logit of each query head [N].
HEAD_LOGITS = "head_logit_max"


def clip_factors(largest_N: jax.Array, threshold: float) -> jax.Array:
    """Factor of each head's logits: 1 up to the threshold."""
    return threshold / jnp.maximum(largest_N, threshold)


def clip_heads(weights: Any, factors_N: jax.Array, *, has_own_keys: bool) -> Any:
    """Attention weights with rescaled projections; `has_own_keys`: every query head has a separate key head."""
    if not has_own_keys:
        return {**weights, "query": scale_heads(weights["query"], factors_N[..., None])}
    roots_N1 = jnp.sqrt(factors_N)[..., None]
    return {**weights, **{name: scale_heads(weights[name], roots_N1) for name in ("query", "key")}}


def clip_latent_heads(weights: Any, factors_N: jax.Array, *, plain_dim: int, rope_dim: int, value_dim: int) -> Any:
    """Weights of latent attention: sqrt(g) for the parts without RoPE, g for the queries of the shared rotary key."""
    roots, whole = jnp.sqrt(factors_N)[..., None], factors_N[..., None]

    def repeat(*parts: tuple[jax.Array, int]) -> jax.Array:
        columns = [jnp.broadcast_to(factor, (*factor.shape[:-1], size)) for factor, size in parts]
        return jnp.concatenate(columns, axis=-1)

    query = "query" if "query" in weights else "query_up"
    factors = {
        query: repeat((roots, plain_dim), (whole, rope_dim)),
        "key_value": repeat((roots, plain_dim), (jnp.ones_like(roots), value_dim)),
    }
    return {**weights, **{name: scale_heads(weights[name], factor) for name, factor in factors.items()}}


def scale_heads(projection: Any, factors_NH: jax.Array) -> Any:
    """A projection to heads, [..., inputs, N, H] with an optional bias [..., N, H], times a factor for each output."""

    def scale(weight: jax.Array, factors: jax.Array) -> jax.Array:
        return (weight.astype(jnp.float32) * factors).astype(weight.dtype)

    scaled = {"kernel": scale(projection["kernel"], factors_NH[..., None, :, :])}
    if "bias" in projection:
        scaled["bias"] = scale(projection["bias"], factors_NH)
    return {**projection, **scaled}
