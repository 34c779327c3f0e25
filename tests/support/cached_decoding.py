"""Logits of a prompt by prefill and decode steps with a dense cache, for comparison with one forward pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from maxhydra.layers import Context, DenseCacheSpec
from maxhydra.model import ModelDef
from maxhydra.sharding import Sharder

DECODE_STEPS = 3


def cached_logits(
    model: ModelDef,
    params: Any,
    tokens_BT: np.ndarray,
    media: Mapping[str, Any],
    axis_positions: Callable[[jax.Array], jax.Array] | None = None,
) -> np.ndarray:
    """[B, T, V] logits: prefill takes the media and all tokens but the last few, which are decoded one by one.

    `media`: fields of the context of prefill. `axis_positions`: those of decoded tokens, of their positions [B, 1].
    """
    sharder, (B, T) = Sharder.single(), tokens_BT.shape
    cache, prefill, outputs = model.empty_cache(DenseCacheSpec(B, T)), T - DECODE_STEPS, []

    @jax.jit
    def step(params: Any, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, sharder), cache

    for start, stop in ((0, prefill), *((at, at + 1) for at in range(prefill, T))):
        positions = jnp.broadcast_to(jnp.arange(start, stop), (B, stop - start))
        ctx = Context(positions=positions, segments=None, sharder=sharder, cache=cache, dropout_key=None)
        if start == 0:
            ctx = dataclasses.replace(ctx, **media, is_fresh=True)
        elif axis_positions is not None:
            ctx = dataclasses.replace(ctx, axis_positions=axis_positions(positions))
        logits, cache = step(params, jnp.asarray(tokens_BT[:, start:stop]), ctx)
        outputs.append(logits)
    return np.concatenate(outputs, axis=1)
