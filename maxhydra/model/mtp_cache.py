"""The first multi-token prediction layer with a cache, for speculative decoding.

The layer combines the hidden state of a token with the embedding of the next token, and predicts the one after that
(DeepSeek-V3, 2024). Its keys and values are therefore computed one token late: a forward pass writes those of the
tokens before its inputs. The hidden state of the last token is kept per slot until the next token is known.

Only keys and values of those tokens are used, so that the compiler removes the layer's attention and feed-forward.

B batch, T tokens, D residual stream.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from maxhydra.layers import Cache, CacheSpec, Context, PageTable
from maxhydra.layers.kv_cache import StateCache, StateSpec
from maxhydra.model.decoder import Decoder, ModelOutput

Tree = Any
# Key of the layer's cache in the cache of the model: a list of its keys and values, and the state of the slots.
MTP = "mtp"


def empty_mtp_cache(decoder: Decoder, cache_spec: CacheSpec) -> list[Cache]:
    """Keys and values of the layer; hidden state and position of the last token of each slot."""
    spec = decoder.spec
    hidden = StateSpec((spec.vocabulary.emb_dim,), spec.dtypes.compute, (None,))
    states = {"hidden": hidden, "position": StateSpec((), jnp.int32, ())}
    return [decoder.mtp["0"].empty_cache(cache_spec, 1), cache_spec.states(1, states)]


def forward_with_mtp_cache(decoder: Decoder, tokens_BT: jax.Array, ctx: Context) -> ModelOutput:
    """Forward pass that also writes the MTP layer's keys and values of the tokens before the inputs."""
    whole_ctx = dataclasses.replace(ctx, output_index=None)
    output = decoder(tokens_BT, whole_ctx, keep_layers=False, mtp_hidden=False)
    hidden_BTD, (keys_values, state) = output.hidden_BTD, ctx.cache[MTP]
    states = state.at(0).read(ctx.rows)
    earlier_BTD = jnp.concatenate([states["hidden"][:, None], hidden_BTD[:, :-1]], axis=1)
    positions_BT = ctx.cached_positions_BT
    # A prompt whose first pages are shared starts without the hidden state of the token before.
    has_state_B = states["position"] + 1 == positions_BT[:, 0]
    has_earlier_BT = (positions_BT > 0).at[:, 0].set((positions_BT[:, 0] > 0) & has_state_B)
    earlier_ctx = _at_positions(ctx, jnp.where(has_earlier_BT, positions_BT - 1, -1))
    keys_values = decoder.predict_mtp(0, earlier_BTD, tokens_BT, earlier_ctx, keys_values).cache
    cache = {**output.cache, MTP: [keys_values, state]}
    assert ctx.rows is not None
    last_B = jnp.maximum(jnp.sum(positions_BT >= 0, axis=1) - 1, 0)
    cache = keep_hidden(cache, hidden_BTD, positions_BT, last_B, ctx.rows)
    return output._replace(hidden_BTD=ctx.select_output_tokens(hidden_BTD), cache=cache)


def keep_hidden(
    cache: Tree, hidden_BTD: jax.Array, positions_BT: jax.Array, index_B: jax.Array, rows: PageTable
) -> Tree:
    """The cache with the hidden state and position of one token per row, whose next token is not an input yet."""
    keys_values, state = cache[MTP]
    hidden_BD = jnp.take_along_axis(hidden_BTD, index_B[:, None, None], axis=1)[:, 0]
    position_B = jnp.take_along_axis(positions_BT, index_B[:, None], axis=1)[:, 0]
    states = {"hidden": hidden_BD, "position": position_B}
    return {**cache, MTP: [keys_values, state.with_layer(state.at(0).write(states, rows))]}


def last_hidden(cache: Tree, rows: PageTable) -> jax.Array:
    """[B, 1, D] the hidden state of the last token of each row."""
    state: StateCache = cache[MTP][1]
    return state.at(0).read(rows)["hidden"][:, None]


def run_mtp_layer(decoder: Decoder, hidden_BTD: jax.Array, next_BT: jax.Array, ctx: Context) -> tuple[jax.Array, Tree]:
    """Hidden states of the layer, given those at ctx.positions and the tokens after them, and the updated cache."""
    keys_values, state = ctx.cache[MTP]
    output = decoder.predict_mtp(0, hidden_BTD, next_BT, ctx, keys_values)
    return output.x_BTD, {**ctx.cache, MTP: [output.cache, state]}


def _at_positions(ctx: Context, positions_BT: jax.Array) -> Context:
    """The context with other positions; -1 marks tokens without one. The first token need not start its row."""
    segments_BT = (positions_BT >= 0).astype(jnp.int32)
    return dataclasses.replace(ctx, positions=positions_BT, segments=segments_BT, output_index=None, is_fresh=False)
