"""Gemma 4 (2026) as it is published, with eyes and ears; the text is read."""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import gemma4

TABLE = nested(
    gemma4.TABLE,
    model_type="gemma4",
    architecture="Gemma4ForConditionalGeneration",
    below=("text_config",),
    body="model.language_model.",
    prefix="",
    ignored=(
        "model.vision_tower.*",
        "model.embed_vision.*",
        "model.audio_tower.*",
        "model.embed_audio.*",
    ),
)
