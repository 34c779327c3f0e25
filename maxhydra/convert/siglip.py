"""SigLIP (Zhai et al., 2023) as the image encoder of multimodal families: its settings and tensor names."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight

# Key of our `model.vision` section -> key of vision_config.
SIZES = {
    "num_layers": "num_hidden_layers",
    "image_size": "image_size",
    "patch_size": "patch_size",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "norm_eps": "layer_norm_eps",
}
# Defaults of keys that the published files omit.
DEFAULTS = {
    "num_hidden_layers": 12,
    "image_size": 224,
    "patch_size": 16,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "layer_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NORMS = {"attention_norm": "layer_norm1", "mlp_norm": "layer_norm2"}
MLP = {"up": "fc1", "down": "fc2"}


def to_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.vision` for a vision_config, without the projector and the tokens."""
    settings = {**DEFAULTS, **settings}
    if settings.get("num_channels", 3) != 3:
        raise UnsupportedError(f"vision_config.num_channels={settings['num_channels']} (supported: 3)")
    return {
        **{key: settings[hf_key] for key, hf_key in SIZES.items()},
        "activation": activation(settings["hidden_act"]),
    }


def to_settings(vision: config.Vision) -> Settings:
    """Inverse of `to_values`."""
    return {
        "model_type": "siglip_vision_model",
        **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
        "hidden_act": activation_setting(vision.activation),
        "vision_use_head": False,
    }


def layer_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of the encoder's layers; `prefix` precedes all of its tensor names."""
    layer = prefix + "encoder.layers.{layer}."
    kernels = (
        Weight(f"{name}/kernel", f"{layer}self_attn.{hf}.weight", inputs=2 if name == "out" else 1)
        for name, hf in PROJECTIONS.items()
    )
    return (
        *kernels,
        *(Weight(f"{name}/bias", f"{layer}self_attn.{hf}.bias", inputs=0) for name, hf in PROJECTIONS.items()),
        *(Weight(f"mlp/{name}/kernel", f"{layer}mlp.{hf}.weight") for name, hf in MLP.items()),
        *(Weight(f"mlp/{name}/bias", f"{layer}mlp.{hf}.bias", inputs=0) for name, hf in MLP.items()),
        *(Weight(f"{name}/scale", f"{layer}{hf}.weight") for name, hf in NORMS.items()),
        *(Weight(f"{name}/bias", f"{layer}{hf}.bias") for name, hf in NORMS.items()),
    )


def other_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of patches, positions and the last norm."""
    patches = prefix + "embeddings.patch_embedding."
    return (
        Weight("vision/patches/kernel", patches + "weight", inputs=3, has_split_inputs=True),
        Weight("vision/patches/bias", patches + "bias", inputs=0),
        Weight("vision/positions", prefix + "embeddings.position_embedding.weight", transposed=False),
        Weight("vision/norm/scale", prefix + "post_layernorm.weight"),
        Weight("vision/norm/bias", prefix + "post_layernorm.bias"),
    )
