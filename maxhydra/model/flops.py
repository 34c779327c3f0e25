"""How large a model is and how much arithmetic a token costs, from shapes and sizes alone."""

import math
from typing import Any

import jax

from maxhydra.config import model as config
from maxhydra.layers import AttentionSpec
from maxhydra.model.block import BlockSpec
from maxhydra.model.decoder import DecoderSpec


def parameter_count(shapes: Any) -> int:
    """Weights in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def flops_per_token(model: config.Model, seq_len: int) -> float:
    """Floating-point operations of one training step per token, forward and backward, as the model needs them.

    A product with a weight matrix costs a token 2 operations per weight, and the backward pass twice as many again.
    What an implementation does besides (recomputation, masked logits) is not counted, nor are norms and activations, so
    that a share of the hardware's peak made of this number is comparable between implementations.
    """
    spec = DecoderSpec.of(model)
    head = model.emb_dim * model.vocab_size
    forward = 2 * head + sum(_layer_flops(layer, seq_len) for layer in spec.layers)
    return 3.0 * forward


def _layer_flops(layer: BlockSpec, seq_len: int) -> float:
    """Forward operations of one layer per token: its weight matrices, then logits and weighted sum of attention."""
    attention, mlp = layer.attention, layer.mlp
    heads = 2 * attention.num_heads + 2 * attention.num_kv_heads
    weights = layer.emb_dim * attention.head_dim * heads + 3 * layer.emb_dim * mlp.dim
    return 2.0 * weights + 4.0 * attention.num_heads * attention.head_dim * visible_keys(attention, seq_len)


def visible_keys(attention: AttentionSpec, seq_len: int) -> float:
    """Keys that a token sees on average: token i sees min(i + 1, window) of them."""
    window = min(attention.window or seq_len, seq_len)
    return (window * (window + 1) / 2 + (seq_len - window) * window) / seq_len
