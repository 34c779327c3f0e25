"""Multimodal checkpoints of families whose text decoder has a table; only the text decoder is loaded."""

import dataclasses
from functools import reduce
from typing import Any

from maxhydra.config.schema import model as config
from maxhydra.convert.name_table import Settings, Table, Weight
from maxhydra.convert.tables import gemma, gemma4, llama4, qwen, qwen3_next

# Prefix of a text-only model's layers, embedding and final norm; the head does not have it.
BODY = "model."


def text_decoder(
    table: Table,
    *,
    model_type: str,
    architecture: str,
    config_keys: tuple[str, ...],
    body: str,
    prefix: str,
    ignored: tuple[str, ...],
) -> Table:
    """Return an import-only table for the text decoder of a multimodal model.

    Export is not supported, since the other modalities would be missing.

    config_keys: path of the text settings in config.json.
    body: replaces BODY in tensor names. prefix: precedes all other tensor names.
    ignored: patterns of tensors of the other modalities.
    """

    def to_model(settings: Settings) -> dict[str, Any]:
        text_settings = reduce(lambda section, key: section[key], config_keys, settings)
        tied = {key: settings[key] for key in ("tie_word_embeddings",) if key in settings}
        return table.to_model({**tied, **text_settings})

    def rename(name: str) -> str:
        return body + name.removeprefix(BODY) if name.startswith(BODY) else prefix + name

    def to_settings(model: config.Model) -> Settings | None:
        return None

    def rename_rows(rows: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(dataclasses.replace(row, hf=rename(row.hf), gguf="") for row in rows)

    return Table(
        hf_types={model_type: architecture},
        layer=rename_rows(table.layer),
        non_layer=rename_rows(table.non_layer),
        to_model=to_model,
        to_settings=to_settings,
        ignored=(*ignored, *map(rename, table.ignored)),
    )


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
    ),
    # Qwen3.5 (Qwen Team, 2026): text and images, dense and with experts.
    text_decoder(
        qwen3_next.QWEN3_5,
        model_type="qwen3_5",
        architecture="Qwen3_5ForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
    ),
    text_decoder(
        qwen3_next.QWEN3_5_MOE,
        model_type="qwen3_5_moe",
        architecture="Qwen3_5MoeForConditionalGeneration",
        config_keys=("text_config",),
        body="model.language_model.",
        prefix="",
        ignored=("model.visual.*",),
    ),
    # Qwen3-Omni (Qwen Team, 2025): the thinker's text decoder. Its 3D rotary positions are equal for text tokens.
    text_decoder(
        qwen.QWEN3_MOE,
        model_type="qwen3_omni_moe",
        architecture="Qwen3OmniMoeForConditionalGeneration",
        config_keys=("thinker_config", "text_config"),
        body="thinker.model.",
        prefix="thinker.",
        ignored=("thinker.visual.*", "thinker.audio_tower.*", "talker.*", "code2wav.*"),
    ),
)
