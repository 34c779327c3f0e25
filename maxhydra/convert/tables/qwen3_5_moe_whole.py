"""Qwen3.5 (Qwen Team, 2026) with experts as it is published, with eyes; the text is read."""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import qwen3_5_moe

TABLE = nested(
    qwen3_5_moe.TABLE,
    model_type="qwen3_5_moe",
    architecture="Qwen3_5MoeForConditionalGeneration",
    below=("text_config",),
    body="model.language_model.",
    prefix="",
    ignored=("model.visual.*",),
)
