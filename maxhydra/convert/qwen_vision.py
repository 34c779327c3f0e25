"""The image encoder of Qwen3-VL (Qwen Team, 2025): its settings and tensor names, and its changes to the decoder.

A vision transformer for images of different sizes, with interpolated learned positions and two-dimensional RoPE; blocks
of patches are concatenated and projected by an MLP. transformers fixes the epsilon of its norms and the activation of
the projector. The decoder has RoPE over three axes, and adds projected outputs of some encoder layers after its first
layers, which form its prefix.
"""

import math
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert import siglip
from maxhydra.convert.hf_config import activation, activation_setting, head, layer_kinds, pattern_of
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight

# Key of our `model.vision` section -> key of vision_config.
SIZES = {
    "num_layers": "depth",
    "patch_size": "patch_size",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_heads",
    "frames": "temporal_patch_size",
    "deepstack": "deepstack_visual_indexes",
}
DEFAULTS = {
    "depth": 27,
    "hidden_size": 1152,
    "hidden_act": "gelu_pytorch_tanh",
    "intermediate_size": 4304,
    "num_heads": 16,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [8, 16, 24],
}
TOKENS = {
    "placeholder_id": "image_token_id",
    "video_id": "video_token_id",
    "begin_id": "vision_start_token_id",
    "end_id": "vision_end_token_id",
}
TOKEN_DEFAULTS = {
    "image_token_id": 151655,
    "video_token_id": 151656,
    "vision_start_token_id": 151652,
    "vision_end_token_id": 151653,
}
NORM_EPS, THETA, SECTIONS = 1e-6, 10000.0, [24, 20, 20]
# The smallest and the largest image are settings of the preprocessor. Its smallest has 65,536 pixels; its largest,
# 16,777,216, would be padded to in every batch, so that ours has 1,048,576.
MIN_PATCHES, MAX_PATCHES = 256, 4096
# The most encoder layers with a separate projector; published models have three.
MAX_DEEPSTACK = 32
TOWER = "model.visual."
BLOCK = TOWER + "blocks.{layer}."
QKV = ("query", "key", "value")


def _linear_rows(names: dict[str, str], inputs: int = 1) -> tuple[Weight, ...]:
    """Rows of projections with a bias: name of ours -> name of theirs."""
    kernels = (Weight(f"{name}/kernel", f"{hf}.weight", inputs=inputs) for name, hf in names.items())
    return (*kernels, *(Weight(f"{name}/bias", f"{hf}.bias", inputs=0) for name, hf in names.items()))


def _projector_rows(name: str, hf: str) -> tuple[Weight, ...]:
    return _linear_rows({f"{name}/hidden/0": f"{hf}.linear_fc1", f"{name}/out": f"{hf}.linear_fc2"})


LAYER = (
    Weight(tuple(f"{name}/kernel" for name in QKV), BLOCK + "attn.qkv.weight"),
    Weight(tuple(f"{name}/bias" for name in QKV), BLOCK + "attn.qkv.bias", inputs=0),
    *_linear_rows({"out": BLOCK + "attn.proj"}, inputs=2),
    *_linear_rows({"mlp/up": BLOCK + "mlp.linear_fc1", "mlp/down": BLOCK + "mlp.linear_fc2"}),
    *siglip.norm_rows({"attention_norm": BLOCK + "norm1", "mlp_norm": BLOCK + "norm2"}),
)
NON_LAYER = (
    Weight("vision/patches/kernel", TOWER + "patch_embed.proj.weight", inputs=4, has_split_inputs=True),
    Weight("vision/patches/bias", TOWER + "patch_embed.proj.bias", inputs=0),
    Weight("vision/positions", TOWER + "pos_embed.weight", transposed=False),
    *siglip.norm_rows({"vision/norm": TOWER + "merger.norm"}),
    *_projector_rows("vision/projector", TOWER + "merger"),
    *(
        row
        for i in range(MAX_DEEPSTACK)
        for row in (
            *siglip.norm_rows({f"vision/deepstack/{i}/norm": f"{TOWER}deepstack_merger_list.{i}.norm"}),
            *_projector_rows(f"vision/deepstack/{i}", f"{TOWER}deepstack_merger_list.{i}"),
        )
    ),
)


def to_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.vision` for the contents of config.json."""
    vision, tokens = {**DEFAULTS, **settings["vision_config"]}, {**TOKEN_DEFAULTS, **settings}
    block, rows = vision["spatial_merge_size"], math.isqrt(vision["num_position_embeddings"])
    siglip.require_settings(vision, {"in_channels": 3, "out_hidden_size": settings["text_config"]["hidden_size"]})
    if rows**2 != vision["num_position_embeddings"] or rows % block:
        raise UnsupportedError(
            f"vision_config.num_position_embeddings={vision['num_position_embeddings']} (supported: the square of a "
            f"multiple of spatial_merge_size={block})"
        )
    if len(vision["deepstack_visual_indexes"]) > MAX_DEEPSTACK:
        count = len(vision["deepstack_visual_indexes"])
        raise UnsupportedError(f"vision_config.deepstack_visual_indexes of {count} (supported: {MAX_DEEPSTACK})")
    return {
        **{key: vision[hf_key] for key, hf_key in SIZES.items()},
        "deepstack": list(vision["deepstack_visual_indexes"]),
        "image_size": rows * vision["patch_size"],
        "min_patches": MIN_PATCHES,
        "max_patches": MAX_PATCHES,
        "activation": activation(vision["hidden_act"]),
        "norm_eps": NORM_EPS,
        "rope_theta": (vision.get("rope_parameters") or {}).get("rope_theta", THETA),
        "projector": {
            "pooling": "concatenate",
            "tokens": (rows // block) ** 2,
            "norm": False,
            "bias": True,
            "hidden_dims": [vision["hidden_size"] * block**2],
            "activation": "gelu",
        },
        **{key: tokens[hf_key] for key, hf_key in TOKENS.items()},
    }


def to_settings(vision: config.Vision) -> Settings:
    """Inverse of `to_values`, without the width of the decoder."""
    return {
        "vision_config": {
            **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
            "hidden_act": activation_setting(vision.activation),
            "in_channels": 3,
            "num_position_embeddings": vision.patch_rows**2,
            "spatial_merge_size": vision.block_size,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
        },
        **{hf_key: getattr(vision, key) for key, hf_key in TOKENS.items()},
    }


def change_decoder(values: dict[str, Any], settings: Settings) -> dict[str, Any]:
    """Values of `model` with RoPE over three axes, and with the layers that add encoder outputs as prefix."""
    text = settings["text_config"]
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    if not parameters.get("mrope_interleaved", True):
        raise UnsupportedError("text_config.rope_parameters.mrope_interleaved=false (supported: true)")
    for kind in values["kinds"].values():
        rope = {**kind["attention"]["rope"], "sections": list(parameters.get("mrope_section", SECTIONS))}
        kind["attention"] = {**kind["attention"], "rope": rope}
    pattern, count = values.get("pattern", ["layer"]), len(values["vision"]["deepstack"])
    names = [pattern[index % len(pattern)] for index in range(values["num_layers"])]
    # The text settings of published files may contradict those of the whole model, which apply.
    tied = {"head": head(settings, tied=False)} if "tie_word_embeddings" in settings else {}
    return {**values, **tied, "prefix": names[:count], "pattern": pattern_of(names[count:])}


def change_settings(settings: Settings, model: config.Model) -> Settings:
    """Inverse of `change_decoder`; also the width of the decoder and the types of both parts."""
    text, vision, model_type = settings["text_config"], settings["vision_config"], settings["model_type"]
    sections = layer_kinds(model)[0].attention.rope.sections
    scaling = {"rope_type": "default", **(text["rope_scaling"] or {})}
    scaling |= {"mrope_section": list(sections), "mrope_interleaved": True}
    return {
        **settings,
        "text_config": {**text, "model_type": f"{model_type}_text", "rope_scaling": scaling},
        "vision_config": {**vision, "model_type": f"{model_type}_vision", "out_hidden_size": model.emb_dim},
    }
