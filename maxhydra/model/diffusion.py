"""Block diffusion (BD3-LM; Arriola et al., 2025): noise, attention masks, and the denoising of one block.

Position 0 of a sequence is a prefix, and block b has the positions 1 + b * size to (b + 1) * size. A token attends to
its own block and to all earlier ones. In training, a noised copy of the sequence is followed by the clean one: noised
tokens attend to their noised block and to the clean tokens of earlier blocks, clean tokens to clean ones.

B batch, S tokens of a row, T tokens of a call, L tokens of a block, V vocabulary.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxhydra.config.schema.diffusion import Diffusion
from maxhydra.layers import Context
from maxhydra.layers.kv_cache import DenseCache
from maxhydra.model.model_def import ModelDef
from maxhydra.sharding import Sharder

Tree = Any


class Noised(NamedTuple):
    """A noised copy of tokens."""

    tokens_BS: jax.Array
    scale_BS: jax.Array
    """Weight of each token's cross-entropy in the NELBO: 1 / t if it is masked, else 0."""


def block_number(positions: jax.Array, size: int) -> jax.Array:
    """Number of the block of each position, counted from 1; the prefix at position 0 has number 0."""
    return (positions + size - 1) // size


def add_noise(
    tokens_BS: jax.Array, positions_BS: jax.Array, weights_BS: jax.Array, diffusion: Diffusion, key: jax.Array
) -> Noised:
    """Mask the tokens of each block with a probability t, uniform between min_noise and 1.

    Each row has another stratum of t in its n-th block, which lowers the variance of the loss (Kingma et al., 2021).
    Tokens without a weight, such as a prompt, stay clean. `positions_BS`: of the tokens, the first of a sequence is 1.
    """
    size, mask = _block_size(diffusion), diffusion.mask_token
    assert mask is not None
    level_key, order_key, mask_key = jax.random.split(key, 3)
    B, S = tokens_BS.shape
    strata_BS = jnp.broadcast_to(jnp.arange(B)[:, None], (B, S))
    strata_BS = jax.random.permutation(order_key, strata_BS, axis=0, independent=True)
    uniform_BS = (strata_BS + jax.random.uniform(level_key, (B, S))) / B
    is_start_BS = (positions_BS - 1) % size == 0
    block_BS = jnp.maximum(jnp.cumsum(is_start_BS, axis=1) - 1, 0)
    level_BS = jnp.take_along_axis(uniform_BS, block_BS, axis=1)
    level_BS = diffusion.min_noise + (1 - diffusion.min_noise) * level_BS
    is_masked_BS = (jax.random.uniform(mask_key, (B, S)) < level_BS) & (weights_BS > 0)
    return Noised(jnp.where(is_masked_BS, mask, tokens_BS), jnp.where(is_masked_BS, 1 / level_BS, 0.0))


def training_mask(noised_positions_BS: jax.Array, clean_positions_BS: jax.Array, size: int) -> jax.Array:
    """[B, 2S, 2S] keys that the tokens of a noised copy, followed by the clean one, attend to."""
    noised_BS, clean_BS = block_number(noised_positions_BS, size), block_number(clean_positions_BS, size)
    query, key = (lambda blocks: blocks[:, :, None]), (lambda blocks: blocks[:, None, :])
    of_noised = jnp.concatenate([query(noised_BS) == key(noised_BS), query(noised_BS) > key(clean_BS)], axis=2)
    of_clean = query(clean_BS) >= key(clean_BS)
    of_clean = jnp.concatenate([jnp.zeros_like(of_clean), of_clean], axis=2)
    return jnp.concatenate([of_noised, of_clean], axis=1)


def extend(
    model: ModelDef, params: Tree, cache: Tree, tokens_BT: jax.Array, span: tuple[Any, Any], sharder: Sharder
) -> tuple[jax.Array, Tree]:
    """Hidden states of tokens with a dense cache, and the cache with them.

    `span`: position of the first token, and number of tokens; those behind are padding.
    """
    start, count = span
    offset_T = jnp.arange(tokens_BT.shape[1])
    positions_BT = jnp.broadcast_to(start + offset_T, tokens_BT.shape)
    size, slots = _block_size(model.config.diffusion), jnp.arange(_cache_length(cache))
    visible_BTS = block_number(slots, size) <= block_number(positions_BT, size)[:, :, None]
    segments_BT = jnp.broadcast_to((offset_T < count).astype(jnp.int32), tokens_BT.shape)
    context = Context(
        positions=positions_BT,
        segments=segments_BT,
        sharder=sharder,
        cache=cache,
        dropout_key=None,
        visible_BTS=visible_BTS,
    )
    return model.hidden(params, tokens_BT, context)


class Denoising(NamedTuple):
    """How a block is denoised."""

    steps: int
    """Maximum number of forward passes."""
    temperature: Any
    """Divides the logits; 0 takes the most likely tokens."""
    key: jax.Array


def denoise_block(
    model: ModelDef,
    params: Tree,
    cache: Tree,
    tokens_BL: jax.Array,
    start: jax.Array,
    denoising: Denoising,
    *,
    sharder: Sharder,
) -> tuple[jax.Array, Tree]:
    """The block at position `start` without its mask tokens, and the cache with it.

    Each step samples all masked tokens and keeps those of the highest probability, an equal number in every step. The
    rows of the batch are copies of one sequence.
    """
    mask, L = model.config.diffusion.mask_token, tokens_BL.shape[1]

    def is_unfinished(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.any(state[1] == mask)

    def step(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        number, tokens_BL = state
        hidden_BLD, _ = extend(model, params, cache, tokens_BL, (start, L), sharder)
        logits_LV = model.logits(params, hidden_BLD, sharder)[0].astype(jnp.float32)
        logits_LV = jnp.where(jnp.arange(logits_LV.shape[1]) == mask, -jnp.inf, logits_LV)
        sampled_L, probability_L = _sample(logits_LV, denoising.temperature, jax.random.fold_in(denoising.key, number))
        is_masked_L = tokens_BL[0] == mask
        count = -(-jnp.sum(is_masked_L) // jnp.maximum(denoising.steps - number, 1))
        order_L = jnp.argsort(jnp.where(is_masked_L, -probability_L, jnp.inf))
        is_chosen_L = is_masked_L & (jnp.argsort(order_L) < count)
        return number + 1, jnp.where(is_chosen_L, sampled_L, tokens_BL)

    _, tokens_BL = jax.lax.while_loop(is_unfinished, step, (jnp.int32(0), tokens_BL))
    return tokens_BL[0], extend(model, params, cache, tokens_BL, (start, L), sharder)[1]


def _sample(logits_LV: jax.Array, temperature: jax.Array, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """A token for each position, and its probability under the model."""
    sampled_L = jax.random.categorical(key, logits_LV / jnp.maximum(temperature, 1e-6))
    token_L = jnp.where(temperature > 0, sampled_L, jnp.argmax(logits_LV, axis=-1)).astype(jnp.int32)
    return token_L, jnp.take_along_axis(jax.nn.softmax(logits_LV), token_L[:, None], axis=1)[:, 0]


def _block_size(diffusion: Diffusion) -> int:
    assert diffusion.block_size is not None
    return diffusion.block_size


def _cache_length(cache: Tree) -> int:
    """Slots of a row; layers that share the keys of another have no cache."""
    keys = [layer.key_LBSKH for layer in jax.tree.leaves(cache, is_leaf=_is_dense) if _is_dense(layer)]
    return int(keys[0].shape[2])


def _is_dense(node: Any) -> bool:
    return isinstance(node, DenseCache)
