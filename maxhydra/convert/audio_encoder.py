"""The audio encoder of Qwen3-Omni's thinker: its settings and tensor names."""

from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.config.schema.audio import NUM_CONVOLUTIONS, halve
from maxhydra.convert.hf_config import activation, activation_setting
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight

# Key of our `model.audio` section -> key of audio_config.
SIZES = {
    "num_layers": "encoder_layers",
    "num_bands": "num_mel_bins",
    "conv_dim": "downsample_hidden_size",
    "emb_dim": "d_model",
    "mlp_dim": "encoder_ffn_dim",
    "num_heads": "encoder_attention_heads",
}
# Defaults of keys that the published files may omit.
DEFAULTS = {
    "encoder_layers": 32,
    "num_mel_bins": 128,
    "downsample_hidden_size": 480,
    "d_model": 1280,
    "encoder_ffn_dim": 5120,
    "encoder_attention_heads": 20,
    "activation_function": "gelu",
    "n_window": 50,
    "n_window_infer": 800,
}
# Key of our `model.audio` section -> key of the thinker's settings.
TOKENS = {
    "placeholder_id": "audio_token_id",
    "begin_id": "audio_start_token_id",
    "end_id": "audio_end_token_id",
}
PROJECTIONS = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "out": "out_proj"}
NORMS = {"attention_norm": "self_attn_layer_norm", "mlp_norm": "final_layer_norm"}
MLP = {"up": "fc1", "down": "fc2"}
# Path below `audio/` -> name, and axes of inputs.
OTHERS = {"chunks": ("conv_out", 2), "projector/hidden": ("proj1", 1), "projector/out": ("proj2", 1)}
# The token count of transformers has 13 tokens per chunk, whatever n_window is.
CHUNK_TOKENS = 13


def to_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.audio` for the settings of a thinker."""
    encoder = {**DEFAULTS, **settings["audio_config"]}
    frames = 2 * encoder["n_window"]
    width = settings["text_config"]["hidden_size"]
    if (out := encoder.get("output_dim", width)) != width:
        raise UnsupportedError(f"audio_config.output_dim={out} (supported: text_config.hidden_size={width})")
    if halve(frames, NUM_CONVOLUTIONS) != CHUNK_TOKENS:
        raise UnsupportedError(f"audio_config.n_window={encoder['n_window']} (supported: 49 to 52)")
    return {
        **{key: encoder[hf_key] for key, hf_key in SIZES.items()},
        "activation": activation(encoder["activation_function"]),
        "chunk_frames": frames,
        "window_chunks": encoder["n_window_infer"] // frames,
        **{key: settings.get(hf_key) for key, hf_key in TOKENS.items()},
    }


def to_settings(model: config.Model) -> Settings:
    """Inverse of `to_values`."""
    audio = model.audio
    tokens = {hf_key: getattr(audio, key) for key, hf_key in TOKENS.items()}
    return {
        "audio_config": {
            "model_type": "qwen3_omni_moe_audio_encoder",
            **{hf_key: getattr(audio, key) for key, hf_key in SIZES.items()},
            "activation_function": activation_setting(audio.activation),
            "n_window": audio.chunk_frames // 2,
            "n_window_infer": audio.window_chunks * audio.chunk_frames,
            "output_dim": model.emb_dim,
        },
        **{hf_key: id for hf_key, id in tokens.items() if id is not None},
    }


def layer_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of the encoder's layers; `prefix` precedes all of its tensor names."""
    layer = prefix + "layers.{layer}."
    return (
        *(
            Weight(f"{name}/kernel", f"{layer}self_attn.{hf}.weight", inputs=2 if name == "out" else 1)
            for name, hf in PROJECTIONS.items()
        ),
        *(Weight(f"{name}/bias", f"{layer}self_attn.{hf}.bias", inputs=0) for name, hf in PROJECTIONS.items()),
        *(Weight(f"mlp/{name}/kernel", f"{layer}{hf}.weight") for name, hf in MLP.items()),
        *(Weight(f"mlp/{name}/bias", f"{layer}{hf}.bias", inputs=0) for name, hf in MLP.items()),
        *(Weight(f"{name}/scale", f"{layer}{hf}.weight") for name, hf in NORMS.items()),
        *(Weight(f"{name}/bias", f"{layer}{hf}.bias") for name, hf in NORMS.items()),
    )


def other_rows(prefix: str) -> tuple[Weight, ...]:
    """Rows of convolutions, chunk embedding, last norm and projector."""
    convolutions = {f"audio/convolutions/{index}": f"{prefix}conv2d{index + 1}." for index in range(NUM_CONVOLUTIONS)}
    return (
        *(
            Weight(f"{path}/kernel", hf + "weight", inputs=3, has_split_inputs=True)
            for path, hf in convolutions.items()
        ),
        *(Weight(f"{path}/bias", hf + "bias", inputs=0) for path, hf in convolutions.items()),
        *(Weight(f"audio/{path}/kernel", f"{prefix}{hf}.weight", inputs=n) for path, (hf, n) in OTHERS.items()),
        *(Weight(f"audio/{path}/bias", f"{prefix}{hf}.bias", inputs=0) for path, (hf, _) in OTHERS.items()),
        Weight("audio/norm/scale", prefix + "ln_post.weight"),
        Weight("audio/norm/bias", prefix + "ln_post.bias"),
    )
