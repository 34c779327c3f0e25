"""Text decoders inside multimodal Hugging Face folders."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from maxhydra.convert.hf import hf_source
from maxhydra.convert.streaming import single_device_shardings, stream_weights
from maxhydra.model import build

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
# Text-only golden model -> multimodal model_type, path of the text settings, replacement of `model.` in tensor names,
# prefix of other tensor names, a tensor of another modality.
MULTIMODAL = {
    "gemma3": ("gemma3", ("text_config",), "language_model.model.", "language_model.", "vision_tower.head.probe"),
    "gemma4": ("gemma4", ("text_config",), "model.language_model.", "", "model.embed_vision.weight"),
    "llama4_text": (
        "llama4",
        ("text_config",),
        "language_model.model.",
        "language_model.",
        "vision_model.class_embedding",
    ),
    "mistral4": (
        "mistral3",
        ("text_config",),
        "language_model.model.",
        "language_model.",
        "vision_tower.ln_pre.weight",
    ),
    "qwen3.5": ("qwen3_5", ("text_config",), "model.language_model.", "", "model.visual.pos_embed.weight"),
    "qwen3.5_moe": ("qwen3_5_moe", ("text_config",), "model.language_model.", "", "model.visual.pos_embed.weight"),
    "qwen3_moe": ("qwen3_omni_moe", ("thinker_config", "text_config"), "thinker.model.", "thinker.", "talker.weight"),
}


def write_multimodal(
    folder: Path, text: Path, model_type: str, keys: tuple[str, ...], body: str, prefix: str, other: str
) -> None:
    """Write the same tensors under the names of the multimodal model, plus a tensor of another modality."""
    settings = json.loads((text / "config.json").read_text())
    for key in reversed(keys):
        settings = {key: settings}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    content = (text / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    renamed = {
        body + name.removeprefix("model.") if name.startswith("model.") else prefix + name: entry
        for name, entry in tensors.items()
    }
    end = max(entry["data_offsets"][1] for entry in tensors.values())
    renamed[other] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    encoded = json.dumps(renamed).encode()
    (folder / "model.safetensors").write_bytes(
        len(encoded).to_bytes(8, "little") + encoded + content[8 + size :] + bytes(4)
    )


@pytest.mark.slow
@pytest.mark.default_cases("gemma3", "qwen3_moe")
@pytest.mark.parametrize("family", MULTIMODAL)
def test_the_text_decoder_equals_the_text_only_model(family: str, tmp_path: Path) -> None:
    write_multimodal(tmp_path, GOLDEN / family, *MULTIMODAL[family])
    params = []
    for folder in (GOLDEN / family, tmp_path):
        source = hf_source("", str(folder), folder)
        model = build(source.model)
        params.append(stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, *params)
