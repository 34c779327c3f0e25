"""Qwen3-Omni (Qwen Team, 2025) as it is published; the text of its thinker is read.

Its rotary positions have three dimensions, which are three times the same for text.
"""

from maxhydra.convert.nested import nested
from maxhydra.convert.tables import qwen3_moe

TABLE = nested(
    qwen3_moe.TABLE,
    model_type="qwen3_omni_moe",
    architecture="Qwen3OmniMoeForConditionalGeneration",
    below=("thinker_config", "text_config"),
    body="thinker.model.",
    prefix="thinker.",
    ignored=("thinker.visual.*", "thinker.audio_tower.*", "talker.*", "code2wav.*"),
)
