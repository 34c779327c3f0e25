"""The image encoder of Llama 4 (Meta, 2025): its settings and tensor names.

A vision transformer with a class token behind the patches, learned positions and two-dimensional RoPE; pixel shuffle
and an MLP project its patches. transformers fixes the epsilon of its norms and its activations.
"""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert import siglip
from maxhydra.convert.hf_config import rope
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight

SIZES = {key: hf_key for key, hf_key in siglip.SIZES.items() if key != "norm_eps"}
NORM_EPS = 1e-5
# Defaults of keys that files may omit.
DEFAULTS = {
    "num_hidden_layers": 34,
    "image_size": 448,
    "patch_size": 14,
    "hidden_size": 768,
    "intermediate_size": 5632,
    "num_attention_heads": 16,
    "vision_output_dim": 7680,
    "pixel_shuffle_ratio": 0.5,
    "projector_input_dim": 4096,
    "projector_output_dim": 4096,
}
TOKENS = {"placeholder_id": "image_token_index", "begin_id": "boi_token_index", "end_id": "eoi_token_index"}
TOKEN_DEFAULTS = {"image_token_index": 200092, "boi_token_index": 200080, "eoi_token_index": 200081}
# Of the published tokenizer and image processor; config.json has none of them.
TILES = {"max_tiles": 16, "column_id": 200084, "row_id": 200085, "whole_id": 200090}
TOWER = "vision_model."
LAYER = siglip.layer_rows(
    TOWER + "model.layers.{layer}.",
    projections={**siglip.PROJECTIONS, "out": "o_proj"},
    norms={"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    interleaved_rope=True,
)
NON_LAYER = (
    Weight("vision/patches/kernel", TOWER + "patch_embedding.linear.weight", inputs=3),
    Weight("vision/class_token", TOWER + "class_embedding"),
    Weight("vision/positions", TOWER + "positional_embedding_vlm", transposed=False),
    *siglip.norm_rows({"vision/pre_norm": TOWER + "layernorm_pre", "vision/norm": TOWER + "layernorm_post"}),
    Weight("vision/projector/hidden/0/kernel", TOWER + "vision_adapter.mlp.fc1.weight"),
    Weight("vision/projector/hidden/1/kernel", TOWER + "vision_adapter.mlp.fc2.weight"),
    Weight("vision/projector/out/kernel", "multi_modal_projector.linear_1.weight"),
)


def to_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.vision` for the contents of config.json."""
    vision = {**DEFAULTS, **settings["vision_config"]}
    block = round(1 / vision["pixel_shuffle_ratio"])
    out_dim = vision["projector_output_dim"]
    fitting = {"intermediate_size": vision["hidden_size"] * block**2, "projector_input_dim": out_dim}
    siglip.require_settings(vision, {"num_channels": 3, "vision_output_dim": out_dim, **fitting})
    rows = vision["image_size"] // vision["patch_size"]
    if rows % block:
        raise UnsupportedError(f"vision_config.pixel_shuffle_ratio={vision['pixel_shuffle_ratio']} for {rows} patches")
    tokens = {**TOKEN_DEFAULTS, **settings}
    has_separators = max(TILES.values()) < settings["text_config"]["vocab_size"]
    return {
        **{key: vision[hf_key] for key, hf_key in SIZES.items()},
        "activation": "gelu",
        "norm_eps": NORM_EPS,
        "patch_bias": False,
        "class_token": True,
        "rope_theta": rope(vision)["theta"],
        "pre_norm": True,
        "projector": {
            "pooling": "concatenate",
            "tokens": (rows // block) ** 2,
            "norm": False,
            "hidden_dims": [vision["projector_input_dim"], out_dim],
            "activation": "gelu",
        },
        "tiles": {key: value for key, value in TILES.items() if has_separators or key == "max_tiles"},
        **{key: tokens[hf_key] for key, hf_key in TOKENS.items()},
    }


def to_settings(vision: config.Vision) -> Settings:
    """Inverse of `to_values`."""
    projector, ratio = vision.projector, vision.token_rows / vision.patch_rows
    input_dim, out_dim = (*projector.hidden_dims, 0, 0)[:2]
    return {
        "vision_config": {
            "model_type": "llama4_vision_model",
            **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
            "hidden_act": "gelu",
            "norm_eps": NORM_EPS,
            "pixel_shuffle_ratio": ratio,
            "projector_input_dim": input_dim,
            "projector_output_dim": out_dim,
            "vision_output_dim": out_dim,
            "rope_parameters": {"rope_type": "default", "rope_theta": vision.rope_theta},
        },
        **{hf_key: getattr(vision, key) for key, hf_key in TOKENS.items()},
    }
