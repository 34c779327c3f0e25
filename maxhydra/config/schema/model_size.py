"""Estimated number of weights of a model, from its sizes alone: nothing is built to count them."""

from collections import Counter
from collections.abc import Iterator

from maxhydra.config.declare import MAX_PARAMETERS
from maxhydra.config.errors import Problem
from maxhydra.config.schema.model import FeedForward, Head, Kind, Mixer, MlpKind, Model, Positions


def parameter_estimate(model: Model) -> int:
    """Number of weights of the large matrices, within a few percent of all; nothing is built to count them."""
    return (
        (1 + (model.head is Head.separate)) * model.vocab_size * model.emb_dim
        + (model.embedding.positions is Positions.learned) * model.context_length * model.emb_dim
        + (model.per_layer.dim or 0) * model.num_layers * model.vocab_size
        + sum(count * _kind_estimate(model, model.kinds[name]) for name, count in Counter(model.layer_kinds()).items())
    )


def _kind_estimate(model: Model, kind: Kind) -> int:
    """Estimated weights of one layer."""
    attention, delta, mla, width = kind.attention, kind.delta, kind.mla, model.emb_dim
    heads, kv_heads = attention.num_heads or model.num_heads, attention.num_kv_heads or model.num_kv_heads
    head_dim = attention.head_dim or model.head_dim
    if kind.mixer is Mixer.delta:
        keys = (delta.num_key_heads or heads) * (delta.key_dim or head_dim)
        mixer = width * (2 * keys + 3 * (delta.num_value_heads or heads) * (delta.value_dim or head_dim))
    elif kind.mixer is Mixer.mla:
        nope, value = mla.qk_nope_head_dim or head_dim, mla.v_head_dim or head_dim
        query = heads * (nope + mla.qk_rope_head_dim)
        rank = mla.q_lora_rank
        mixer = width * query if rank is None else rank * (width + query)
        mixer += mla.kv_lora_rank * (width + heads * (nope + value)) + width * (mla.qk_rope_head_dim + heads * value)
    else:
        mixer = 2 * width * head_dim * (heads + kv_heads)
    return mixer + width * _feed_forward_width(model, kind)


def _feed_forward_width(model: Model, kind: Kind) -> int:
    """Hidden units of a layer's feed-forward, over all experts, times the matrices that each is part of."""
    dense, experts = kind.mlp.dim or model.mlp_dim, kind.moe.experts or 0
    routed = experts * (kind.moe.dim or model.mlp_dim)
    has_mlp = kind.feed_forward is FeedForward.mlp
    return 3 * (routed + (kind.moe.shared.dim or 0)) + (2 + (kind.mlp.kind is MlpKind.gated)) * dense * has_mlp


def size_problems(model: Model) -> Iterator[Problem]:
    """Yield the problem of sizes that are accepted one by one and give a model that no machine holds."""
    is_known = all(name in model.kinds for name in (*model.prefix, *model.pattern)) and model.pattern
    if is_known and (count := parameter_estimate(model)) > MAX_PARAMETERS:
        reason = f"gives a model of about {count:.2g} parameters with the other sizes"
        yield Problem("model.num_layers", reason, model.num_layers, f"sizes of at most {MAX_PARAMETERS:.0e} parameters")
