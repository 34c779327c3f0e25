"""The tile sizes to try: those that the kernels of a model offer for its shapes."""

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

# Kernel of an operation (empty if it has only one) -> tile sizes by name.
TileOptions = dict[str, list[dict[str, int]]]


def tiles(config: Config, hardware: Hardware) -> Iterator[tuple[str, str, list[str]]]:
    """For each tunable kernel: the override that chooses its backend, the key of its tile, and the values to try."""
    if hardware.platform is not Platform.gpu:
        log.info("not tuning tiles: no kernel on %s has configurable tiles", hardware.platform.value)
        return
    for backend, operation, kernels in _tile_options(config):
        for kernel, options in kernels.items():
            key = ".".join(filter(None, ("model.kernels.tiles", backend, operation, kernel)))
            values = ["{" + ",".join(f"{name}:{size}" for name, size in sizes.items()) + "}" for sizes in options]
            if values:
                yield f"model.kernels.{operation}={backend}", key, values


def _tile_options(config: Config) -> Iterator[tuple[str, str, TileOptions]]:
    """Backend, operation and tile sizes for the rows of one sequence, which divide the rows of any batch."""
    model, length = config.model, config.train.seq_len
    used = [model.kinds[name] for name in dict.fromkeys((*model.prefix, *model.pattern))]
    mixers = [AttentionSpec.of(model, kind) for kind in used if kind.mixer is Mixer.attention]
    if mixers:
        # Tiles that fit in registers for the largest heads fit for all.
        head_dim = max(mixer.head_dim for mixer in mixers)
        yield "mosaic", "attention", mosaic.candidate_tiles(head_dim, length)
        yield "triton", "attention", triton.candidate_tiles(head_dim, length)
    for moe in [kind.moe for kind in used if kind.feed_forward is FeedForward.moe][:1]:
        rows, dim = length * moe.top_k, moe.dim or model.mlp_dim
        yield "triton", "grouped_matmul", grouped_matmul.candidate_tiles(rows, model.emb_dim, dim)
    yield "triton", "linear_cross_entropy", linear_cross_entropy.candidate_tiles(model.vocab_size)
    if model.norm is not Norm.layer:
        yield "triton", "rms_norm", rms_norm.candidate_tiles(length)
    if any(mixer.uses_qkv_rope for mixer in mixers):
        yield "triton", "qkv_rope", qkv_rope.candidate_tiles(length)
