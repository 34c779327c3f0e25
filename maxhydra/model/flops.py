"""Parameter counts and FLOPs of a model, computed from its config without allocating weights."""

import math
from typing import Any

import jax

from maxhydra.config.schema import model as config
from maxhydra.model.decoder import DecoderSpec
from maxhydra.model.model_def import build


def parameter_count(shapes: Any) -> int:
    """Number of weights in a tree of arrays or shapes."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def active_parameters(model: config.Model) -> int:
    """Number of weights used per token, including embedding and head: all but the experts it is not routed to."""
    spec = DecoderSpec.of(model)
    idle = sum(layer.idle_parameters() for layer in spec.layers)
    if model.mtp.depth:
        idle += model.mtp.depth * spec.layers[-1].idle_parameters()
    return parameter_count(build(model).shapes) - idle


def flops_per_token(model: config.Model, seq_len: int) -> float:
    """Model FLOPs per token of one training step, forward and backward.

    A matmul costs a token 2 FLOPs per weight, and the backward pass twice as many again. Rematerialization, masked
    logits, norms and activations are not counted, so an MFU based on this number is comparable between implementations.
    """
    spec = DecoderSpec.of(model)
    head = model.emb_dim * model.vocab_size
    forward = 2 * head + sum(layer.forward_flops(seq_len) for layer in spec.layers)
    if model.mtp.depth:
        forward += model.mtp.depth * (spec.layers[-1].forward_flops(seq_len) + 2 * head + 4 * model.emb_dim**2)
    return 3.0 * forward
