"""Sizes of tiles to try: what the kernels that a model calls offer for its shapes."""

import logging
from collections.abc import Iterator

from maxhydra.config import Config
from maxhydra.config.schema.hardware import Hardware, Platform
from maxhydra.config.schema.model import FeedForward, Mixer, Norm
from maxhydra.kernels.attention import mosaic, triton
from maxhydra.kernels.grouped_matmul import triton as grouped_matmul
from maxhydra.kernels.linear_cross_entropy import triton as linear_cross_entropy
from maxhydra.kernels.qkv_rope import triton as qkv_rope
from maxhydra.kernels.rms_norm import triton as rms_norm
from maxhydra.layers.attention import AttentionSpec

log = logging.getLogger("maxhydra")

# Kernel of an operation, empty where it has but one -> sizes by name.
Offered = dict[str, list[dict[str, int]]]


def tiles(config: Config, hardware: Hardware) -> Iterator[tuple[str, str, list[str]]]:
    """A backend by name as an override, the key of a tile of its kernels, and values as one would write them."""
    if hardware.platform is not Platform.gpu:
        log.info("no kernel whose tile can be chosen runs on %s: tiles are not tried", hardware.platform.value)
        return
    for backend, operation, kernels in _offered(config):
        for kernel, offered in kernels.items():
            key = ".".join(filter(None, ("model.kernels.tiles", backend, operation, kernel)))
            values = ["{" + ",".join(f"{name}:{size}" for name, size in sizes.items()) + "}" for sizes in offered]
            if values:
                yield f"model.kernels.{operation}={backend}", key, values


def _offered(config: Config) -> Iterator[tuple[str, str, Offered]]:
    """By backend and operation, for rows of one sequence, which divides all that a batch has."""
    model, length = config.model, config.train.seq_len
    used = [model.kinds[name] for name in dict.fromkeys((*model.prefix, *model.pattern))]
    mixers = [AttentionSpec.of(model, kind) for kind in used if kind.mixer is Mixer.attention]
    if mixers:
        # What registers hold of the largest heads, they hold of all.
        head_dim = max(mixer.head_dim for mixer in mixers)
        yield "mosaic", "attention", mosaic.tried(head_dim, length)
        yield "triton", "attention", triton.tried(head_dim, length)
    for moe in [kind.moe for kind in used if kind.feed_forward is FeedForward.moe][:1]:
        rows, dim = length * moe.top_k, moe.dim or model.mlp_dim
        yield "triton", "grouped_matmul", grouped_matmul.tried(rows, model.emb_dim, dim)
    yield "triton", "linear_cross_entropy", linear_cross_entropy.tried(model.vocab_size)
    if model.norm is not Norm.layer:
        yield "triton", "rms_norm", rms_norm.tried(length)
    if any(mixer.turns_plainly for mixer in mixers):
        yield "triton", "qkv_rope", qkv_rope.tried(length)
