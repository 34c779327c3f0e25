"""Gemma 3 (2025) as it is published, with eyes; the text is read."""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import gemma3

TABLE = nested(
    gemma3.TABLE,
    model_type="gemma3",
    architecture="Gemma3ForConditionalGeneration",
    below=("text_config",),
    body="language_model.model.",
    prefix="language_model.",
    ignored=(
        "vision_tower.*",
        "multi_modal_projector.*",
    ),
)
