"""The text of models that see or hear, as they are published: the part of a larger folder."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest

from maxhydra.convert.hf import hf_source
from maxhydra.convert.stream_in import single_device_shardings, stream_weights
from maxhydra.model import build

GOLDEN = Path(__file__).parents[1] / "parity" / "golden"
# Golden model of the text -> model_type of the whole, keys of its settings, what stands for `model.` in the names of
# tensors, the prefix of others, another tensor.
WHOLES = {
    "gemma3": ("gemma3", ("text_config",), "language_model.model.", "language_model.", "vision_tower.head.probe"),
    "gemma4": ("gemma4", ("text_config",), "model.language_model.", "", "model.embed_vision.weight"),
    "llama4_text": (
        "llama4",
        ("text_config",),
        "language_model.model.",
        "language_model.",
        "vision_model.class_embedding",
    ),
    "qwen3.5": ("qwen3_5", ("text_config",), "model.language_model.", "", "model.visual.pos_embed.weight"),
    "qwen3.5_moe": ("qwen3_5_moe", ("text_config",), "model.language_model.", "", "model.visual.pos_embed.weight"),
    "qwen3_moe": ("qwen3_omni_moe", ("thinker_config", "text_config"), "thinker.model.", "thinker.", "talker.weight"),
}


def write_whole(
    folder: Path, text: Path, model_type: str, keys: tuple[str, ...], body: str, prefix: str, other: str
) -> None:
    """The same bytes under the names of the larger model, with a tensor of another part, which is as large as one."""
    settings = json.loads((text / "config.json").read_text())
    for key in reversed(keys):
        settings = {key: settings}
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, **settings}))
    whole = (text / "model.safetensors").read_bytes()
    size = int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8 : 8 + size])
    tensors = {name: told for name, told in header.items() if name != "__metadata__"}
    renamed = {
        body + name.removeprefix("model.") if name.startswith("model.") else prefix + name: told
        for name, told in tensors.items()
    }
    end = max(told["data_offsets"][1] for told in tensors.values())
    renamed[other] = {"dtype": "F32", "shape": [1], "data_offsets": [end, end + 4]}
    told = json.dumps(renamed).encode()
    (folder / "model.safetensors").write_bytes(len(told).to_bytes(8, "little") + told + whole[8 + size :] + bytes(4))


@pytest.mark.parametrize("family", WHOLES)
def test_the_text_of_a_larger_model_is_that_of_the_text_alone(family: str, tmp_path: Path) -> None:
    write_whole(tmp_path, GOLDEN / family, *WHOLES[family])
    both = []
    for folder in (GOLDEN / family, tmp_path):
        source = hf_source("", str(folder), folder)
        model = build(source.model)
        both.append(stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32"))
    jax.tree.map(np.testing.assert_array_equal, *both)
