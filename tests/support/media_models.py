"""Models with images and audio for comparison with transformers: weights of a folder, logits, and an export."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from maxhydra.config.schema.model import Dtype, Dtypes
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.streaming import FileArrays, single_device_shardings, stream_weights
from maxhydra.layers import Context
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder

# Sections of config.json of tiny models of transformers.
QWEN_TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
QWEN_VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "out_hidden_size": 32,
}
# Ids of tokens of Qwen3-Omni.
VIDEO, AUDIO_BEGIN, AUDIO_END, CLIP, BEGIN, END, IMAGE = range(56, 63)
OMNI_IDS = {
    "audio_token_id": CLIP,
    "audio_start_token_id": AUDIO_BEGIN,
    "audio_end_token_id": AUDIO_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "position_id_per_seconds": 13,
}
OMNI_AUDIO = {
    "num_mel_bins": 20,
    "encoder_layers": 1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "d_model": 24,
    "output_dim": 32,
    "downsample_hidden_size": 6,
    "n_window": 50,
    "n_window_infer": 200,
}
GEMMA4_VISION = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_attention_heads": 3,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "patch_size": 4,
    "pooling_kernel_size": 2,
    "position_embedding_size": 160,
}


def omni_thinker(**text: int) -> dict[str, Any]:
    """The config of a thinker of Qwen3-Omni; `text`: other values of its text decoder."""
    sections = {"audio_config": OMNI_AUDIO, "vision_config": QWEN_VISION}
    return {"text_config": {**QWEN_TEXT, **QWEN_EXPERTS, **text}, **sections, **OMNI_IDS}


def randomize(model: Any, *, std: float = 0.2) -> Any:
    """A model of transformers with random weights that are large enough for every mechanism to matter."""
    for name, weight in model.named_parameters():
        is_scale = ("norm" in name or "ln_" in name) and name.endswith("weight")
        weight.data.normal_(float(is_scale), std)
    return model


def load_float32(folder: Path, **changes: Any) -> tuple[ModelDef, Any]:
    """The model of a Hugging Face folder and its weights; `changes`: sections of the model's config."""
    source = hf_source("", str(folder), folder)
    model = build(dataclasses.replace(source.model, dtypes=Dtypes(compute=Dtype.float32), **changes))
    return model, stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32")


def forward_logits(model: ModelDef, params: Any, tokens_BT: np.ndarray, media: Mapping[str, Any]) -> np.ndarray:
    """[B, T, V] logits of one forward pass; `media`: fields of the context, as for `cached_logits`."""
    sharder = Sharder.single()

    @jax.jit
    def run(params: Any, tokens: jax.Array, media: Mapping[str, Any]) -> jax.Array:
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        ctx = Context(positions=positions, segments=None, sharder=sharder, cache=None, dropout_key=None, **media)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], sharder)

    return np.asarray(run(params, jnp.asarray(tokens_BT), jax.tree.map(jnp.asarray, dict(media))))


class Export(NamedTuple):
    """The differences of an exported folder from the one that it was read from."""

    model_type: str
    missing: set[str]
    """Tensors that it does not have."""
    before: dict[str, Any]
    after: dict[str, Any]
    """Contents of config.json."""


def export(folder: Path, target: Path) -> Export:
    """Read a folder and write it again; its tensors must be equal, and it must not have others."""
    source = hf_source("", str(folder), folder)
    model = build(source.model)
    table = find_family(model, None)
    write_hf(target, model, FileArrays(source, model), table=table, dtype=np.dtype("float32"), extra={})
    stored, exported = (load_file(path / "model.safetensors") for path in (folder, target))
    assert exported.keys() <= stored.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, stored[name])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, target))
    return Export(table.model_type, stored.keys() - exported.keys(), before, after)
