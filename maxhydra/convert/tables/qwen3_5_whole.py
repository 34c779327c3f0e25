"""Qwen3.5 (Qwen Team, 2026) as it is published, with eyes; the text is read."""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import qwen3_5

TABLE = nested(
    qwen3_5.TABLE,
    model_type="qwen3_5",
    architecture="Qwen3_5ForConditionalGeneration",
    below=("text_config",),
    body="model.language_model.",
    prefix="",
    ignored=("model.visual.*",),
)
