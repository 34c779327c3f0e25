"""The image and audio encoders of Gemma 4 (2026): their settings and tensor names.

Images: a vision transformer for different sizes. Positions are the sum of learned vectors of column and row, and RoPE
turns each half of a head with one of them; norms are RMSNorm. Mean vectors of blocks of patches are projected. Audio: a
conformer. transformers fixes the epsilon of some of its norms and the width of its feed-forward.
"""

import math
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight
from maxhydra.convert.siglip import require_settings, video_setting, video_token

# Key of our `model.vision` section -> key of vision_config.
SIZES = {
    "num_layers": "num_hidden_layers",
    "patch_size": "patch_size",
    "emb_dim": "hidden_size",
    "mlp_dim": "intermediate_size",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
    "axis_positions": "position_embedding_size",
}
# Defaults of keys that the published files may omit.
DEFAULTS = {
    "num_hidden_layers": 16,
    "patch_size": 16,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_attention_heads": 12,
    "rms_norm_eps": 1e-6,
    "position_embedding_size": 10240,
    "hidden_activation": "gelu_pytorch_tanh",
    "pooling_kernel_size": 3,
    "use_clipped_linears": False,
    "standardize": False,
}
TOKENS = {"placeholder_id": "image_token_id", "begin_id": "boi_token_id", "end_id": "eoi_token_id"}
TOKEN_DEFAULTS = {"image_token_id": 258880, "boi_token_id": 255999, "eoi_token_id": 258882}
VIDEO_TOKEN = 258884
THETA, SOFT_TOKENS = 100.0, 280
# Settings of the video processor, which config.json does not name: tokens of a frame, and frames.
FRAME_TOKENS, FRAMES = 70, 32
# Rows of tokens of an image of model.vision.image_size, which relates patches to tokens: 256 tokens.
TOKEN_ROWS = 16
TOWER = "model.vision_tower."
LAYER = TOWER + "encoder.layers.{layer}."
PROJECTIONS = {
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "out": "self_attn.o_proj",
    "mlp/gate": "mlp.gate_proj",
    "mlp/up": "mlp.up_proj",
    "mlp/down": "mlp.down_proj",
}
NORMS = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
BOUNDS = ("input_min", "input_max", "output_min", "output_max")


def projection_rows(path: str, hf: str, *, inputs: int = 1, axial_rope: bool = False) -> tuple[Weight, ...]:
    """Rows of a projection without bias, and of its bounds if it is clipped."""
    kernels = (f"{path}/kernel", f"{path}/linear/kernel")
    return (
        *(Weight(kernel, f"{hf}.linear.weight", inputs=inputs, axial_rope=axial_rope) for kernel in kernels),
        *(Weight(f"{path}/bounds/{name}", f"{hf}.{name}", inputs=0) for name in BOUNDS),
    )


VISION_LAYER = (
    *(
        row
        for path, hf in PROJECTIONS.items()
        for row in projection_rows(
            path, LAYER + hf, inputs=2 if path == "out" else 1, axial_rope=path in ("query", "key")
        )
    ),
    *(Weight(f"{path}/scale", f"{LAYER}{hf}.weight") for path, hf in NORMS.items()),
    Weight("query_norm/scale", LAYER + "self_attn.q_norm.weight", axial_rope=True),
    Weight("key_norm/scale", LAYER + "self_attn.k_norm.weight", axial_rope=True),
)
VISION_NON_LAYER = (
    # Patches are channel, frame, row, column; those of the tensor row, column, channel.
    Weight("vision/patches/kernel", TOWER + "patch_embedder.input_proj.weight", inputs=4, input_order=(2, 3, 0, 1)),
    Weight(
        "vision/positions",
        TOWER + "patch_embedder.position_embedding_table",
        inputs=2,
        transposed=False,
        has_split_inputs=True,
    ),
    Weight("vision/projector/shift", TOWER + "std_bias"),
    Weight("vision/projector/factor", TOWER + "std_scale"),
    Weight("vision/projector/out/kernel", "model.embed_vision.embedding_projection.weight"),
)


def vision_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.vision` for the contents of config.json."""
    vision, tokens = {**DEFAULTS, **settings["vision_config"]}, {**TOKEN_DEFAULTS, **settings}
    heads, block = vision["num_attention_heads"], vision["pooling_kernel_size"]
    required = {"num_key_value_heads": heads, "head_dim": vision["hidden_size"] // heads}
    require_settings(vision, {**required, "attention_bias": False})
    require_padding(settings)
    rope = vision.get("rope_parameters") or {}
    if rope.get("rope_type", "axial") not in ("axial", "default"):
        raise UnsupportedError(f"vision_config.rope_parameters.rope_type={rope['rope_type']} (supported: axial)")
    is_bidirectional = settings["text_config"].get("use_bidirectional_attention") == "vision"
    return {
        **{key: vision[hf_key] for key, hf_key in SIZES.items()},
        "image_size": TOKEN_ROWS * block * vision["patch_size"],
        "max_patches": settings.get("vision_soft_tokens_per_image", SOFT_TOKENS) * block**2,
        "fill_patches": True,
        "activation": activation(vision["hidden_activation"]),
        "patch_bias": False,
        "rope_theta": rope.get("rope_theta", THETA),
        "final_norm": False,
        "layers": {
            "norm": "rms",
            "sandwich": True,
            "qkv_norm": True,
            "gated": True,
            "bias": False,
            "clipped": vision["use_clipped_linears"],
        },
        "projector": {
            "pooling": "average",
            "tokens": TOKEN_ROWS**2,
            "scaled": True,
            "standardized": vision["standardize"],
            "norm_scale": False,
        },
        "bidirectional": is_bidirectional,
        "causal_without_window": is_bidirectional,
        **{key: tokens[hf_key] for key, hf_key in TOKENS.items()},
        "video_id": video_token(settings.get("video_token_id", VIDEO_TOKEN), settings["text_config"]),
        "videos": {
            "fps": None,
            "max_frames": FRAMES,
            "max_patches": FRAME_TOKENS * block**2,
            "per_frame": True,
            "timestamps": "minutes",
        },
    }


def require_padding(settings: Settings) -> None:
    """Raise UnsupportedError unless the padding token, whose per-layer embedding other media have, is 0."""
    if (padding := settings["text_config"].get("pad_token_id", 0)) != 0:
        raise UnsupportedError(f"text_config.pad_token_id={padding} (supported: 0)")


def vision_settings(vision: config.Vision) -> Settings:
    """Inverse of `vision_values`, without the text settings."""
    assert vision.max_patches is not None
    return {
        "vision_config": {
            "model_type": "gemma4_vision",
            **{hf_key: getattr(vision, key) for key, hf_key in SIZES.items()},
            "num_key_value_heads": vision.num_heads,
            "head_dim": vision.emb_dim // vision.num_heads,
            "hidden_activation": activation_setting(vision.activation),
            "pooling_kernel_size": vision.block_size,
            "rope_parameters": {"rope_type": "axial", "rope_theta": vision.rope_theta},
            "use_clipped_linears": vision.layers.clipped,
            "standardize": vision.projector.standardized,
        },
        "vision_soft_tokens_per_image": math.ceil(vision.max_patches / vision.block_size**2),
        **{hf_key: getattr(vision, key) for key, hf_key in TOKENS.items()},
        **video_setting(vision),
    }


def change_settings(settings: Settings, model: config.Model) -> Settings:
    """Settings with the attention among image tokens, which is part of the text settings."""
    direction = {"use_bidirectional_attention": "vision"} if model.vision.bidirectional else {}
    return {**settings, "text_config": {**settings["text_config"], **direction}}


# Key of our `model.audio` section -> key of audio_config.
AUDIO_SIZES = {
    "num_layers": "num_hidden_layers",
    "emb_dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "norm_eps": "rms_norm_eps",
}
# Key of our `model.audio.conformer` section -> key of audio_config.
CONFORMER = {
    "conv_dims": "subsampling_conv_channels",
    "kernel_size": "conv_kernel_size",
    "softcap": "attention_logit_cap",
    "hidden_dim": "output_proj_dims",
    "clipped": "use_clipped_linears",
}
AUDIO_DEFAULTS = {
    "num_hidden_layers": 12,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "subsampling_conv_channels": [128, 32],
    "conv_kernel_size": 5,
    "attention_chunk_size": 12,
    "attention_context_left": 13,
    "attention_logit_cap": 50.0,
    "output_proj_dims": 1536,
    "use_clipped_linears": True,
}
AUDIO_TOKENS = {"placeholder_id": "audio_token_id", "begin_id": "boa_token_id", "end_id": "eoa_token_index"}
AUDIO_TOKEN_DEFAULTS = {"audio_token_id": 258881, "boa_token_id": 256000, "eoa_token_index": 258883}
# Settings with one supported value.
AUDIO_REQUIRED = {
    "rms_norm_eps": 1e-6,
    "attention_context_right": 0,
    "residual_weight": 0.5,
    "gradient_clipping": 1e10,
}
# Samples of a frame of 20 milliseconds at 16 kHz.
FRAME_LENGTH = 320
AUDIO_TOWER = "model.audio_tower."
SUBSAMPLING = AUDIO_TOWER + "subsample_conv_projection."
AUDIO_LAYER = AUDIO_TOWER + "layers.{layer}."
AUDIO_PROJECTIONS = {
    "first/mlp/up": "feed_forward1.ffw_layer_1",
    "first/mlp/down": "feed_forward1.ffw_layer_2",
    "last/mlp/up": "feed_forward2.ffw_layer_1",
    "last/mlp/down": "feed_forward2.ffw_layer_2",
    "attention/query": "self_attn.q_proj",
    "attention/key": "self_attn.k_proj",
    "attention/value": "self_attn.v_proj",
    "attention/out": "self_attn.post",
    "convolution/up": "lconv1d.linear_start",
    "convolution/out": "lconv1d.linear_end",
}
AUDIO_NORMS = {
    "first/norm": "feed_forward1.pre_layer_norm",
    "first/out_norm": "feed_forward1.post_layer_norm",
    "last/norm": "feed_forward2.pre_layer_norm",
    "last/out_norm": "feed_forward2.post_layer_norm",
    "attention_norm": "norm_pre_attn",
    "attention_out_norm": "norm_post_attn",
    "convolution/norm": "lconv1d.pre_layer_norm",
    "convolution/filter_norm": "lconv1d.conv_norm",
    "norm": "norm_out",
}
CONVOLUTIONS = 2

AUDIO_LAYER_ROWS = (
    *(
        row
        for path, hf in AUDIO_PROJECTIONS.items()
        for row in projection_rows(path, AUDIO_LAYER + hf, inputs=2 if path == "attention/out" else 1)
    ),
    *(Weight(f"{path}/scale", f"{AUDIO_LAYER}{hf}.weight") for path, hf in AUDIO_NORMS.items()),
    Weight("attention/distance/kernel", AUDIO_LAYER + "self_attn.relative_k_proj.weight"),
    Weight("attention/query_scale", AUDIO_LAYER + "self_attn.per_dim_scale"),
    Weight("convolution/filter/kernel", AUDIO_LAYER + "lconv1d.depthwise_conv1d.weight", singleton_axis=1),
)
AUDIO_NON_LAYER = (
    *(
        row
        for i in range(CONVOLUTIONS)
        for row in (
            Weight(
                f"audio/convolutions/{i}/kernel", f"{SUBSAMPLING}layer{i}.conv.weight", inputs=3, has_split_inputs=True
            ),
            Weight(f"audio/convolutions/{i}/norm/scale", f"{SUBSAMPLING}layer{i}.norm.weight"),
        )
    ),
    Weight("audio/tokens/kernel", SUBSAMPLING + "input_proj_linear.weight", inputs=2),
    Weight("audio/projector/hidden/kernel", AUDIO_TOWER + "output_proj.weight"),
    Weight("audio/projector/hidden/bias", AUDIO_TOWER + "output_proj.bias", inputs=0),
    Weight("audio/projector/out/kernel", "model.embed_audio.embedding_projection.weight"),
)


def audio_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.audio` for the contents of config.json."""
    audio, tokens = {**AUDIO_DEFAULTS, **settings["audio_config"]}, {**AUDIO_TOKEN_DEFAULTS, **settings}
    channels, window = list(audio["subsampling_conv_channels"]), audio["attention_chunk_size"]
    require_settings(audio, {**AUDIO_REQUIRED, "attention_context_left": window + 1}, section="audio_config")
    require_padding(settings)
    if len(channels) != CONVOLUTIONS or channels[0] % 4:
        accepted = "two numbers, the first the mel bands and divisible by 4"
        raise UnsupportedError(f"audio_config.subsampling_conv_channels={channels} (supported: {accepted})")
    return {
        **{key: audio[hf_key] for key, hf_key in AUDIO_SIZES.items()},
        "encoder": "conformer",
        "features": "semicausal_magnitude",
        "frame_length": FRAME_LENGTH,
        "num_bands": channels[0],
        "mlp_dim": 4 * audio["hidden_size"],
        "activation": activation(audio["hidden_act"]),
        "conformer": {
            **{key: audio[hf_key] for key, hf_key in CONFORMER.items()},
            "conv_dims": channels,
            "window": window,
        },
        **{key: tokens[hf_key] for key, hf_key in AUDIO_TOKENS.items()},
    }


def audio_settings(model: config.Model) -> Settings:
    """Inverse of `audio_values`."""
    audio, window = model.audio, model.audio.conformer.window
    return {
        "audio_config": {
            "model_type": "gemma4_audio",
            **{hf_key: getattr(audio, key) for key, hf_key in AUDIO_SIZES.items()},
            **{hf_key: getattr(audio.conformer, key) for key, hf_key in CONFORMER.items()},
            **AUDIO_REQUIRED,
            "hidden_act": activation_setting(audio.activation),
            "attention_chunk_size": window,
            "attention_context_left": window + 1,
        },
        **{hf_key: getattr(audio, key) for key, hf_key in AUDIO_TOKENS.items()},
    }
