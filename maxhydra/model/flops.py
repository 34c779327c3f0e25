"""How large a model is and how much arithmetic a token costs, from shapes and sizes alone."""

import math
from typing import Any

import jax

from maxhydra.config.schema import model as config
from maxhydra.model.decoder import DecoderSpec
from maxhydra.model.model_def import build


def parameter_count(shapes: Any) -> int:
    """Weights in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def active_parameters(model: config.Model) -> int:
    """Weights that a token meets, embedding and head among them: all but the experts it is not given to."""
    spec = DecoderSpec.of(model)
    idle = sum(layer.idle_parameters() for layer in spec.layers)
    if model.mtp.depth:
        idle += model.mtp.depth * spec.layers[-1].idle_parameters()
    return parameter_count(build(model).shapes) - idle


def flops_per_token(model: config.Model, seq_len: int) -> float:
    """Floating-point operations of one training step per token, forward and backward, as the model needs them.

    A product with a weight matrix costs a token 2 operations per weight, and the backward pass twice as many again.
    What an implementation does besides (recomputation, masked logits) is not counted, nor are norms and activations, so
    that a share of the hardware's peak made of this number is comparable between implementations.
    """
    spec = DecoderSpec.of(model)
    head = model.emb_dim * model.vocab_size
    forward = 2 * head + sum(layer.forward_flops(seq_len) for layer in spec.layers)
    if model.mtp.depth:
        forward += model.mtp.depth * (spec.layers[-1].forward_flops(seq_len) + 2 * head + 4 * model.emb_dim**2)
    return 3.0 * forward
