"""Llama 4 (Meta, 2025) as it is published, with the part that sees; its text is read."""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import llama4

TABLE = nested(
    llama4.TABLE,
    model_type="llama4",
    architecture="Llama4ForConditionalGeneration",
    below=("text_config",),
    body="language_model.model.",
    prefix="language_model.",
    ignored=("vision_model.*", "multi_modal_projector.*"),
)
