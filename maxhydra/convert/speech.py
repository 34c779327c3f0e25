"""Talker, code predictor and vocoder of Qwen3-Omni (Qwen Team, 2025): their settings and tensor names."""

import dataclasses
from collections.abc import Iterator
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.config.schema.speech import DILATIONS, MAX_STAGES, SpeechDecoder, Vocoder
from maxhydra.convert.hf_config import SIZES, activation, activation_setting, rope, size_settings, sizes
from maxhydra.convert.name_table import Settings, UnsupportedError, Weight
from maxhydra.convert.tables import llama, qwen3_next

TALKER, PREDICTOR, VOCODER = "talker.", "talker.code_predictor.", "code2wav."
# Sizes that only the talker has.
OF_TALKER = ("vocab_size", "context_length")
# Key of our sections -> key of text_config, code_predictor_config and code2wav_config.
DECODER_SIZES = {key: hf_key for key, hf_key in SIZES.items() if key not in OF_TALKER}
TALKER_SIZES = {
    **{key: SIZES[key] for key in OF_TALKER},
    "top_k": "num_experts_per_tok",
    "expert_dim": "moe_intermediate_size",
    "shared_dim": "shared_expert_intermediate_size",
    "normalize": "norm_topk_prob",
}
VOCODER_SIZES = {
    "window": "sliding_window",
    "conv_dim": "decoder_dim",
    "ratios": "upsampling_ratios",
    "rates": "upsample_rates",
}
# Key of `talker` -> key of talker_config.
CODES = {
    "hidden_layer": "accept_hidden_layer",
    "end_code": "codec_eos_token_id",
    "pad_code": "codec_pad_id",
    "begin_code": "codec_bos_id",
}
# Keys of talker_config with the codes before that of the voice.
PROMPT_CODES = ("codec_nothink_id", "codec_think_bos_id", "codec_think_eos_id")
# Key of `model.speech` -> key of config.json.
TOKENS = {
    "begin_id": "tts_bos_token_id",
    "end_id": "tts_eos_token_id",
    "pad_id": "tts_pad_token_id",
    "turn_id": "im_start_token_id",
    "user_id": "user_token_id",
    "assistant_id": "assistant_token_id",
}
# Defaults of keys that the published files may omit.
DEFAULTS = {
    "tts_pad_token_id": 151671,
    "tts_bos_token_id": 151672,
    "tts_eos_token_id": 151673,
    "im_start_token_id": 151644,
    "user_token_id": 872,
    "assistant_token_id": 77091,
}
TALKER_DEFAULTS = {
    "accept_hidden_layer": 18,
    "codec_eos_token_id": 4198,
    "codec_nothink_id": 4203,
    "codec_think_bos_id": 4204,
    "codec_think_eos_id": 4205,
    "codec_pad_id": 4196,
    "codec_bos_id": 4197,
}
# Codes at the end of the talker's vocabulary that transformers never generates, other than the end.
SPECIAL_CODES = 1024


def _require(settings: Settings, name: str, **values: Any) -> None:
    """Raise UnsupportedError for other values of keys that have no equivalent."""
    for key, value in values.items():
        if settings.get(key, value) != value:
            raise UnsupportedError(f"{name}.{key}={settings[key]} (supported: {value})")


def _decoder_values(settings: Settings, name: str) -> dict[str, Any]:
    """Values that all three decoders have."""
    _require(settings, name, attention_bias=False)
    found = rope(settings)
    if found.keys() != {"theta"}:
        raise UnsupportedError(f"{name}.rope_parameters of kind {found.get('kind')} (supported: default)")
    return {
        **sizes(settings, DECODER_SIZES),
        "activation": activation(settings["hidden_act"]),
        "rope_theta": found["theta"],
    }


def _decoder_settings(section: SpeechDecoder) -> Settings:
    """Inverse of `_decoder_values`."""
    return {
        **size_settings(section, DECODER_SIZES),
        "hidden_act": activation_setting(section.activation),
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": section.rope_theta},
    }


def has_speech(settings: Settings) -> bool:
    """Whether a config.json describes modules that speak."""
    return bool(settings.get("enable_audio_output", True)) and "talker_config" in settings


def to_values(settings: Settings) -> dict[str, Any]:
    """Values of `model.speech` for the contents of config.json."""
    talker, wave = {**TALKER_DEFAULTS, **settings["talker_config"]}, settings["code2wav_config"]
    predictor, tokens = talker["code_predictor_config"], {**DEFAULTS, **settings}
    width = settings["thinker_config"]["text_config"]["hidden_size"]
    groups = talker["num_code_groups"]
    _require(talker, "talker_config", thinker_hidden_size=width)
    _require(predictor, "code_predictor_config", num_code_groups=groups, vocab_size=wave["codebook_size"])
    _require(predictor, "code_predictor_config", sliding_window=None)
    _require(wave, "code2wav_config", num_quantizers=groups)
    return {
        "codebooks": groups,
        "codebook_size": wave["codebook_size"],
        **{key: tokens[hf_key] for key, hf_key in TOKENS.items()},
        "talker": _talker_values(talker),
        "code_predictor": _decoder_values(predictor, "code_predictor_config"),
        "vocoder": {
            **_decoder_values(wave, "code2wav_config"),
            **{key: wave[hf_key] for key, hf_key in VOCODER_SIZES.items()},
        },
    }


def _talker_values(talker: Settings) -> dict[str, Any]:
    text = talker["text_config"]
    _require(text, "talker_config.text_config", decoder_sparse_step=1, mlp_only_layers=[], sliding_window=None)
    parameters = text.get("rope_parameters") or text.get("rope_scaling") or {}
    return {
        **_decoder_values(text, "talker_config.text_config"),
        **{key: text[hf_key] for key, hf_key in TALKER_SIZES.items()},
        "experts": text.get("num_experts") or text["num_local_experts"],
        "sections": list(parameters.get("mrope_section", (24, 20, 20))),
        "special_codes": SPECIAL_CODES,
        "speakers": dict(talker.get("speaker_id") or {}),
        **{key: talker[hf_key] for key, hf_key in CODES.items()},
        "prompt_codes": [talker[hf_key] for hf_key in PROMPT_CODES],
    }


def to_settings(model: config.Model) -> Settings | None:
    """Inverse of `to_values`; None for a model that config.json cannot describe."""
    speech, talker, wave = model.speech, model.speech.talker, model.speech.vocoder
    if talker.special_codes != SPECIAL_CODES or len(talker.prompt_codes) != len(PROMPT_CODES):
        return None
    rope_parameters = {"rope_type": "default", "rope_theta": talker.rope_theta, "mrope_section": talker.sections}
    text = {
        "model_type": "qwen3_omni_moe_talker_text",
        **_decoder_settings(talker),
        **{hf_key: getattr(talker, key) for key, hf_key in TALKER_SIZES.items()},
        "num_experts": talker.experts,
        "num_local_experts": talker.experts,
        "rope_parameters": rope_parameters,
    }
    predictor = {
        "model_type": "qwen3_omni_moe_talker_code_predictor",
        **_decoder_settings(speech.code_predictor),
        "vocab_size": speech.codebook_size,
        "num_code_groups": speech.codebooks,
    }
    return {
        "talker_config": {
            "text_config": text,
            "code_predictor_config": predictor,
            "num_code_groups": speech.codebooks,
            "thinker_hidden_size": model.emb_dim,
            "speaker_id": dict(talker.speakers),
            **{hf_key: getattr(talker, key) for key, hf_key in CODES.items()},
            **dict(zip(PROMPT_CODES, talker.prompt_codes, strict=True)),
            **_media_settings(model),
        },
        "code2wav_config": {
            **_vocoder_settings(wave),
            "codebook_size": speech.codebook_size,
            "num_quantizers": speech.codebooks,
        },
        "enable_audio_output": True,
        **{hf_key: getattr(speech, key) for key, hf_key in TOKENS.items()},
    }


def _vocoder_settings(wave: Vocoder) -> Settings:
    """Settings of the vocoder, whose heads divide its width unless head_dim is set."""
    settings = {**_decoder_settings(wave), **{hf_key: getattr(wave, key) for key, hf_key in VOCODER_SIZES.items()}}
    is_divided = wave.head_dim * wave.num_heads == wave.emb_dim
    return {key: value for key, value in settings.items() if key != "head_dim" or not is_divided}


def _media_settings(model: config.Model) -> Settings:
    """Settings of images and audio, by which the talker computes positions as the model does."""
    vision, audio = model.vision, model.audio
    settings = {
        "image_token_id": vision.placeholder_id,
        "video_token_id": vision.video_id,
        "vision_start_token_id": vision.begin_id,
        "position_id_per_seconds": vision.videos.positions_per_second,
        "audio_token_id": audio.placeholder_id,
        "audio_start_token_id": audio.begin_id,
        "spatial_merge_size": None if vision.num_layers is None else vision.block_size,
    }
    return {key: value for key, value in settings.items() if value is not None}


def _with_prefix(prefix: str, rows: tuple[Weight, ...]) -> tuple[Weight, ...]:
    """Rows of the layers of a text decoder, with another prefix of their tensor names."""
    return tuple(
        dataclasses.replace(row, hf=prefix + row.hf.removeprefix("model."), gguf="", gguf_interleaved_rope=False)
        for row in rows
    )


SCALES = (
    Weight("attention_post_norm/scale", llama.HF + "self_attn_layer_scale.scale"),
    Weight("mlp_post_norm/scale", llama.HF + "mlp_layer_scale.scale"),
)
# Rows of the stacked layers of each decoder.
LAYERS = {
    "talker": _with_prefix(f"{TALKER}model.", (*llama.MIXER, *llama.QK_NORMS, *qwen3_next.QWEN3_NEXT_MOE)),
    "code_predictor": _with_prefix(f"{PREDICTOR}model.", (*llama.LAYER, *llama.QK_NORMS)),
    "vocoder": _with_prefix(f"{VOCODER}pre_transformer.", (*llama.LAYER, *SCALES)),
}


def _linear(path: str, hf: str) -> tuple[Weight, ...]:
    return Weight(f"{path}/kernel", f"{hf}.weight"), Weight(f"{path}/bias", f"{hf}.bias", inputs=0)


def _conv(path: str, hf: str) -> tuple[Weight, ...]:
    """A convolution, whose kernel has the layout of the tensor."""
    return Weight(f"{path}/kernel", f"{hf}.weight", leading=2, transposed=False), Weight(f"{path}/bias", f"{hf}.bias")


def _pointwise(path: str, hf: str) -> tuple[Weight, ...]:
    """A convolution of one tap, whose tensor is that of a linear layer."""
    kernel = Weight(f"{path}/kernel", f"{hf}.weight", leading=1, inputs=2, transposed=False)
    return kernel, Weight(f"{path}/bias", f"{hf}.bias")


def _snake(path: str, hf: str) -> tuple[Weight, ...]:
    return Weight(f"{path}/log_frequency", f"{hf}.alpha"), Weight(f"{path}/log_amplitude", f"{hf}.beta")


def _upsampling_rows() -> Iterator[Weight]:
    for number in range(MAX_STAGES):
        path, hf = f"speech/vocoder/upsample/{number}", f"{VOCODER}upsample.{number}"
        yield from _conv(f"{path}/expand", f"{hf}.0.conv")
        yield from _conv(f"{path}/block/depthwise", f"{hf}.1.dwconv.conv")
        yield from _pointwise(f"{path}/block/up", f"{hf}.1.pwconv1")
        yield from _pointwise(f"{path}/block/down", f"{hf}.1.pwconv2")
        yield Weight(f"{path}/block/norm/scale", f"{hf}.1.norm.weight")
        yield Weight(f"{path}/block/norm/bias", f"{hf}.1.norm.bias")
        yield Weight(f"{path}/block/scale", f"{hf}.1.gamma")


def _wave_rows() -> Iterator[Weight]:
    """Rows of every kind of module for each number; a model has one of them."""
    for number in range(MAX_STAGES + 3):
        path, hf = f"speech/vocoder/wave/modules/{number}", f"{VOCODER}decoder.{number}"
        yield from (*_conv(path, f"{hf}.conv"), *_snake(path, hf))
        yield from (*_snake(f"{path}/snake", f"{hf}.block.0"), *_conv(f"{path}/expand", f"{hf}.block.1.conv"))
        for unit in range(len(DILATIONS)):
            inner, block = f"{path}/units/{unit}", f"{hf}.block.{unit + 2}"
            yield from (*_snake(f"{inner}/snake", f"{block}.act1"), *_snake(f"{inner}/out_snake", f"{block}.act2"))
            yield from _conv(f"{inner}/dilated", f"{block}.conv1.conv")
            yield from _conv(f"{inner}/out", f"{block}.conv2.conv")


# Rows outside of layers.
OTHERS = (
    Weight("speech/talker/embedding", f"{TALKER}model.codec_embedding.weight", transposed=False),
    Weight("speech/talker/decoder/final_norm/scale", f"{TALKER}model.norm.weight"),
    Weight("speech/talker/head/kernel", f"{TALKER}codec_head.weight"),
    *(
        row
        for name in ("text", "hidden")
        for path, layer in (("hidden", 1), ("out", 2))
        for row in _linear(f"speech/talker/{name}/{path}", f"{TALKER}{name}_projection.linear_fc{layer}")
    ),
    # One tensor for each codebook.
    Weight("speech/code_predictor/embeddings", f"{PREDICTOR}model.codec_embedding.{{expert}}.weight", transposed=False),
    Weight("speech/code_predictor/heads", f"{PREDICTOR}lm_head.{{expert}}.weight"),
    Weight("speech/code_predictor/decoder/final_norm/scale", f"{PREDICTOR}model.norm.weight"),
    Weight("speech/vocoder/embedding", f"{VOCODER}code_embedding.weight", transposed=False),
    Weight("speech/vocoder/decoder/final_norm/scale", f"{VOCODER}pre_transformer.norm.weight"),
    *_upsampling_rows(),
    *_wave_rows(),
)
