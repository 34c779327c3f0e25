"""Multimodal checkpoints of families whose text decoder has a table.

Images are supported where the table has a `Vision`, audio where it has an `Audio`, speech with `speaks`; of the other
modalities nothing is loaded.
"""

import dataclasses
from collections.abc import Callable
from functools import reduce
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert import audio_encoder, gemma4_encoders, llama4_vision, qwen_vision, siglip, speech
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import gemma, gemma4, llama4, mistral, qwen, qwen3_next

# Prefix of a text-only model's layers, embedding and final norm; the head does not have it.
BODY = "model."


@dataclasses.dataclass(frozen=True)
class Vision:
    """Image encoder and projector of a multimodal family."""

    layer: tuple[Weight, ...]
    non_layer: tuple[Weight, ...]
    to_values: Callable[[Settings], dict[str, Any]]
    """Converts the section around the text settings to the values of our `model.vision` section."""
    to_settings: Callable[[config.Vision], Settings]
    """Inverse of `to_values`: keys of config.json other than the text settings."""
    renamed: dict[str, str]
    """Prefixes as in `Table.renamed`."""
    change_decoder: Callable[[dict[str, Any], Settings], dict[str, Any]] = lambda values, _: values
    """Adapts the values of `model` to images; its second argument is the section around the text settings."""
    change_settings: Callable[[Settings, config.Model], Settings] = lambda settings, _: settings
    """Inverse of `change_decoder`, from and to the contents of config.json."""


@dataclasses.dataclass(frozen=True)
class Audio:
    """Audio encoder and projector of a multimodal family."""

    layer: tuple[Weight, ...]
    non_layer: tuple[Weight, ...]
    to_values: Callable[[Settings], dict[str, Any]]
    """Converts the section around the text settings to the values of our `model.audio` section."""
    to_settings: Callable[[config.Model], Settings]
    """Inverse of `to_values`."""


def text_decoder(
    table: Table,
    *,
    model_type: str,
    architecture: str,
    config_keys: tuple[str, ...],
    body: str,
    prefix: str,
    ignored: tuple[str, ...],
    vision: Vision | None = None,
    audio: Audio | None = None,
    text_type: str | None = None,
    speaks: bool = False,
) -> Table:
    """Return the table of a multimodal model, from that of its text decoder.

    It is import-only without encoders, and if the text settings are nested in another section without speech.
    config_keys: path of the text settings in config.json.
    body: replaces BODY in tensor names. prefix: precedes all other tensor names.
    ignored: patterns of tensors of the other modalities. text_type: `model_type` of the text settings, if it is not
    that of the text decoder's own files. speaks: whether talker, code predictor and vocoder are loaded too.
    """

    def to_model(settings: Settings) -> dict[str, Any]:
        owner = reduce(lambda section, key: section[key], config_keys[:-1], settings)
        tied = {key: settings[key] for key in ("tie_word_embeddings",) if key in settings}
        values = table.to_model({**tied, **owner[config_keys[-1]]})
        values |= _encoder_values(owner, vision, audio)
        values |= {"speech": speech.to_values(settings)} if speaks and speech.has_speech(settings) else {}
        return vision.change_decoder(values, owner) if vision is not None and "vision" in values else values

    def rename(name: str) -> str:
        return body + name.removeprefix(BODY) if name.startswith(BODY) else prefix + name

    def to_settings(model: config.Model) -> Settings | None:
        text_settings = table.to_settings(model)
        spoken = speech.to_settings(model) if speaks and model.speech.codebooks is not None else None
        if text_settings is None or (len(config_keys) > 1 and spoken is None):
            return None
        text_settings = {"model_type": text_type or table.model_type, **text_settings}
        settings = _add_encoder_settings(model, {config_keys[-1]: text_settings}, vision, audio)
        if settings is None or spoken is None:
            return settings and {"model_type": model_type, **settings}
        return {"model_type": model_type, **spoken, config_keys[0]: {"model_type": f"{model_type}_thinker", **settings}}

    def rename_rows(rows: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(dataclasses.replace(row, hf=rename(row.hf), gguf="") for row in rows)

    return Table(
        hf_types={model_type: architecture},
        layer=rename_rows(table.layer),
        non_layer=(*rename_rows(table.non_layer), *_other_rows(vision, audio, speaks=speaks)),
        to_model=to_model,
        to_settings=to_settings,
        ignored=(*ignored, *map(rename, table.ignored)),
        vision_layer=vision.layer if vision else (),
        audio_layer=audio.layer if audio else (),
        speech_layers=speech.LAYERS if speaks else {},
        renamed=vision.renamed if vision else {},
    )


def _other_rows(vision: Vision | None, audio: Audio | None, *, speaks: bool) -> tuple[Weight, ...]:
    """Rows outside the layers, other than those of the text decoder."""
    encoder_rows = tuple(row for encoder in (vision, audio) if encoder for row in encoder.non_layer)
    return (*encoder_rows, *(speech.OTHERS if speaks else ()))


def _add_encoder_settings(
    model: config.Model, text: Settings, vision: Vision | None, audio: Audio | None
) -> Settings | None:
    """Settings of the whole model, given those of its text decoder; None for a model without encoders."""
    if not (encoder_settings := _encoder_settings(model, vision, audio)):
        return None
    settings = {"tie_word_embeddings": model.head is config.Head.tied, **text, **encoder_settings}
    if vision is None or model.vision.num_layers is None:
        return settings
    return vision.change_settings(settings, model)


def _encoder_values(owner: Settings, vision: Vision | None, audio: Audio | None) -> dict[str, Any]:
    """Sections `vision` and `audio` of our model, for the encoders that the section around the text settings has."""
    values = {}
    if vision is not None and (section := owner.get("vision_config")) is not None and section.get("depth") != 0:
        values["vision"] = vision.to_values(owner)
    if audio is not None and (section := owner.get("audio_config")) is not None:
        if section.get("encoder_layers") == 0:
            return values
        values["audio"] = audio.to_values(owner)
    return values


def _encoder_settings(model: config.Model, vision: Vision | None, audio: Audio | None) -> Settings:
    """Settings of the encoders that a model has."""
    settings: Settings = {}
    if vision is not None and model.vision.num_layers is not None:
        settings = {**settings, **vision.to_settings(model.vision)}
    if audio is not None and model.audio.num_layers is not None:
        settings = {**settings, **audio.to_settings(model)}
    return settings


# Defaults of keys that the published files of Gemma 3 omit.
GEMMA3_TOKENS = {
    "mm_tokens_per_image": 256,
    "image_token_index": 262144,
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
}


def gemma3_values(settings: Settings) -> dict[str, Any]:
    # transformers before version 5 writes *_token_index, later versions also read *_token_id.
    settings = {**GEMMA3_TOKENS, **settings}
    return {
        **siglip.to_values(settings["vision_config"]),
        "projector": {"pooling": "average", "tokens": settings["mm_tokens_per_image"]},
        "bidirectional": True,
        "placeholder_id": settings["image_token_index"],
        "begin_id": settings["boi_token_index"],
        "end_id": settings["eoi_token_index"],
        "separator": "\n\n",
    }


def gemma3_settings(vision: config.Vision) -> Settings:
    return {
        "vision_config": siglip.to_settings(vision),
        "mm_tokens_per_image": vision.projector.tokens,
        "image_token_index": vision.placeholder_id,
        "boi_token_index": vision.begin_id,
        "eoi_token_index": vision.end_id,
    }


TOWER = "vision_tower.vision_model."
GEMMA3_VISION = Vision(
    layer=siglip.layer_rows(TOWER + "encoder.layers.{layer}."),
    non_layer=(
        *siglip.other_rows(TOWER),
        Weight("vision/projector/norm/scale", "multi_modal_projector.mm_soft_emb_norm.weight"),
        Weight("vision/projector/out/kernel", "multi_modal_projector.mm_input_projection_weight", transposed=False),
    ),
    to_values=gemma3_values,
    to_settings=gemma3_settings,
    renamed={f"vision_tower.{part}": TOWER + part for part in ("embeddings.", "encoder.", "post_layernorm.")},
)
LLAMA4_VISION = Vision(
    layer=llama4_vision.LAYER,
    non_layer=llama4_vision.NON_LAYER,
    to_values=llama4_vision.to_values,
    to_settings=llama4_vision.to_settings,
    renamed={},
)


def qwen_images(encoder: qwen_vision.Encoder) -> Vision:
    return Vision(
        layer=encoder.layer,
        non_layer=encoder.non_layer,
        to_values=encoder.to_values,
        to_settings=encoder.to_settings,
        renamed={},
        change_decoder=encoder.change_decoder,
        change_settings=encoder.change_settings,
    )


GEMMA4_VISION = Vision(
    layer=gemma4_encoders.VISION_LAYER,
    non_layer=gemma4_encoders.VISION_NON_LAYER,
    to_values=gemma4_encoders.vision_values,
    to_settings=gemma4_encoders.vision_settings,
    renamed={},
    change_settings=gemma4_encoders.change_settings,
)


GEMMA4_AUDIO = Audio(
    layer=gemma4_encoders.AUDIO_LAYER_ROWS,
    non_layer=gemma4_encoders.AUDIO_NON_LAYER,
    to_values=gemma4_encoders.audio_values,
    to_settings=gemma4_encoders.audio_settings,
)


def omni_audio(prefix: str) -> Audio:
    """The audio encoder of Qwen3-Omni; `prefix` precedes the thinker's tensor names."""
    tower = f"{prefix}audio_tower."
    return Audio(
        layer=audio_encoder.layer_rows(tower),
        non_layer=audio_encoder.other_rows(tower),
        to_values=audio_encoder.to_values,
        to_settings=omni_settings,
    )


def omni_settings(model: config.Model) -> Settings:
    no_images = {} if model.vision.num_layers is not None else {"vision_config": NO_IMAGES}
    return {**audio_encoder.to_settings(model), **no_images}


def omni_images(prefix: str) -> Vision:
    """The image encoder of Qwen3-Omni; `prefix` precedes the thinker's tensor names."""
    vision = qwen_images(qwen_vision.omni(prefix))

    def change_settings(settings: Settings, model: config.Model) -> Settings:
        no_audio = {} if model.audio.num_layers is not None else {"audio_config": NO_AUDIO}
        return {**vision.change_settings(settings, model), **no_audio}

    return dataclasses.replace(vision, change_settings=change_settings)


# The thinker of transformers always has both encoders. An export without one of them describes one without layers.
NO_AUDIO = {"encoder_layers": 0, "d_model": 2, "encoder_attention_heads": 1, "downsample_hidden_size": 1}
NO_IMAGES = {"depth": 0, "deepstack_visual_indexes": [], "hidden_size": 2, "num_heads": 1, "num_position_embeddings": 1}

TABLES = (
    # Gemma 3 (2025): text and images.
    text_decoder(
        gemma.GEMMA3,
        model_type="gemma3",
        architecture="Gemma3ForConditionalGeneration",
        config_keys=("text_config",),
        body="language_model.model.",
        prefix="language_model.",
        ignored=("vision_tower.*", "multi_modal_projector.*"),
        vision=GEMMA3_VISION,
    ),
    # Gemma 4 (2026): text, images and audio.
    text_decoder(
        gemma4.TABLE,
        model_type="gemma4",
        architecture="Gemma4ForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.vision_tower.*", "model.embed_vision.*", "model.audio_tower.*", "model.embed_audio.*"),
        vision=GEMMA4_VISION,
        audio=GEMMA4_AUDIO,
    ),
    # Llama 4 (Meta, 2025): text and images.
    text_decoder(
        llama4.TABLE,
        model_type="llama4",
        architecture="Llama4ForConditionalGeneration",
        config_keys=("text_config",),
        body="language_model.model.",
        prefix="language_model.",
        ignored=("vision_model.*", "multi_modal_projector.*"),
        vision=LLAMA4_VISION,
    ),
    # Qwen3-VL (Qwen Team, 2025): text, images and videos, dense and with experts.
    text_decoder(
        qwen.QWEN3,
        model_type="qwen3_vl",
        architecture="Qwen3VLForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
        vision=qwen_images(qwen_vision.QWEN3_VL),
        text_type="qwen3_vl_text",
    ),
    text_decoder(
        qwen.QWEN3_VL_MOE,
        model_type="qwen3_vl_moe",
        architecture="Qwen3VLMoeForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
        vision=qwen_images(qwen_vision.QWEN3_VL_MOE),
        text_type="qwen3_vl_moe_text",
    ),
    # Mistral Small 4 (Mistral AI, 2026): text and images.
    text_decoder(
        mistral.MISTRAL4,
        model_type="mistral3",
        architecture="Mistral3ForConditionalGeneration",
        config_keys=("text_config",),
        body="language_model.model.",
        prefix="language_model.",
        ignored=("vision_tower.*", "multi_modal_projector.*"),
    ),
    # Qwen3.5 (Qwen Team, 2026): text, images and videos, dense and with experts.
    text_decoder(
        qwen3_next.QWEN3_5,
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
        vision=qwen_images(qwen_vision.QWEN3_5),
    ),
    text_decoder(
        qwen3_next.QWEN3_5_MOE,
        model_type="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
        vision=qwen_images(qwen_vision.QWEN3_5_MOE),
    ),
    # Qwen3-Omni (Qwen Team, 2025): text, images and audio of the thinker, which is exported alone unless the model
    # speaks. The three axes of its rotary positions are equal for tokens of text and audio.
    text_decoder(
        qwen.QWEN3_MOE,
        model_type="qwen3_omni_moe_thinker",
        architecture="Qwen3OmniMoeThinkerForConditionalGeneration",
        config_keys=("text_config",),
        body="model.",
        prefix="",
        ignored=("visual.*", "model.visual.*", "audio_tower.*"),
        vision=omni_images(""),
        audio=omni_audio(""),
        text_type="qwen3_omni_moe_text",
    ),
    text_decoder(
        qwen.QWEN3_MOE,
        model_type="qwen3_omni_moe",
        architecture="Qwen3OmniMoeForConditionalGeneration",
        config_keys=("thinker_config", "text_config"),
        body="thinker.model.",
        prefix="thinker.",
        ignored=("thinker.visual.*", "thinker.audio_tower.*", "talker.*", "code2wav.*"),
        vision=omni_images("thinker."),
        audio=omni_audio("thinker."),
        text_type="qwen3_omni_moe_text",
        speaks=True,
    ),
)
