"""SigLIP (Zhai et al., 2023) as the image encoder of multimodal families: its settings and tensor names."""

from collections.abc import Mapping
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
    require_settings(settings, {"num_channels": 3})
    return {
        **{key: settings[hf_key] for key, hf_key in SIZES.items()},
        "activation": activation(settings["hidden_act"]),
    }


def require_settings(settings: Settings, supported: Mapping[str, Any], section: str = "vision_config") -> None:
    """Raise UnsupportedError for settings of a section that differ from the only supported values."""
    for key, value in supported.items():
        if settings.get(key, value) != value:
            raise UnsupportedError(f"{section}.{key}={settings[key]} (supported: {value})")


def video_token(id: int | None, text: Settings) -> int | None:
    """The placeholder of videos; None if it is not in the vocabulary, as in models that take none."""
    return None if id is None or id >= text.get("vocab_size", id + 1) else id


def video_setting(vision: config.Vision) -> Settings:
    """Inverse of `video_token`."""
    return {} if vision.video_id is None else {"video_token_id": vision.video_id}


def to_settings(vision: config.Vision) -> Settings:
    """Inverse of `to_values`."""
    return {
        "model_type": "siglip_vision_model",
        **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
        "hidden_act": activation_setting(vision.activation),
        "vision_use_head": False,
    }


def layer_rows(
    layer: str,
    *,
    projections: Mapping[str, str] = PROJECTIONS,
    norms: Mapping[str, str] = NORMS,
    interleaved_rope: bool = False,
) -> tuple[Weight, ...]:
    """Rows of the encoder's layers; `layer` precedes the names of a layer's tensors.

    `interleaved_rope`: RoPE of the tensors is on adjacent pairs (see Weight).
    """

    def heads(name: str, kind: str, inputs: int) -> Weight:
        is_interleaved = interleaved_rope and name in ("query", "key")
        hf = f"{layer}self_attn.{projections[name]}.{'weight' if kind == 'kernel' else kind}"
        return Weight(f"{name}/{kind}", hf, inputs=inputs, interleaved_rope=is_interleaved)

    return (
        *(heads(name, "kernel", 2 if name == "out" else 1) for name in projections),
        *(heads(name, "bias", 0) for name in projections),
        *(Weight(f"mlp/{name}/kernel", f"{layer}mlp.{hf}.weight") for name, hf in MLP.items()),
        *(Weight(f"mlp/{name}/bias", f"{layer}mlp.{hf}.bias", inputs=0) for name, hf in MLP.items()),
        *norm_rows({name: layer + hf for name, hf in norms.items()}),
    )


def norm_rows(norms: Mapping[str, str]) -> tuple[Weight, ...]:
    """Rows of LayerNorms: name of ours -> name of theirs."""
    return (
        *(Weight(f"{name}/scale", f"{hf}.weight") for name, hf in norms.items()),
        *(Weight(f"{name}/bias", f"{hf}.bias") for name, hf in norms.items()),
    )


def other_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of patches, positions and the last norm."""
    patches = prefix + "embeddings.patch_embedding."
    return (
        Weight("vision/patches/kernel", patches + "weight", inputs=3, has_split_inputs=True),
        Weight("vision/patches/bias", patches + "bias", inputs=0),
        Weight("vision/positions", prefix + "embeddings.position_embedding.weight", transposed=False),
        *norm_rows({"vision/norm": prefix + "post_layernorm"}),
    )
