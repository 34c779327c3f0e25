"""Qwen3-Omni's thinker against transformers: images of different sizes and an audio clip in one prompt."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.model import Dtype, Dtypes
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family, write_hf
from maxhydra.convert.streaming import FileArrays, single_device_shardings, stream_weights
from maxhydra.data.image_tokens import patch_inputs
from maxhydra.data.images import merged_patches
from maxhydra.layers import AudioClips, Context, DenseCacheSpec
from maxhydra.model import ModelDef, build
from maxhydra.sharding import Sharder
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

SINGLE = Sharder.single()
AUDIO_BEGIN, AUDIO_END, CLIP, BEGIN, END, IMAGE, BANDS, FRAMES = 57, 58, 59, 60, 61, 62, 20, 163
TOKEN_IDS = {
    "audio_token_id": CLIP,
    "audio_start_token_id": AUDIO_BEGIN,
    "audio_end_token_id": AUDIO_END,
    "image_token_id": IMAGE,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
}
TEXT = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "max_position_embeddings": 512,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
}
AUDIO = {
    "num_mel_bins": BANDS,
    "encoder_layers": 1,
    "encoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "d_model": 24,
    "output_dim": 32,
    "downsample_hidden_size": 6,
    "n_window": 50,
    "n_window_infer": 200,
}
VISION = {
    "depth": 3,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_heads": 3,
    "patch_size": 4,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
    "out_hidden_size": 32,
}
# Pixels [frames, height, width, 3] of images of 2 x 3 and 4 x 1 tokens.
GENERATOR = np.random.default_rng(0)
PIXELS = [GENERATOR.normal(size=(1, *size, 3)).astype(np.float32) for size in ((16, 24), (32, 8))]
CLIP_FRAMES = GENERATOR.normal(size=(FRAMES, BANDS)).astype(np.float32)
# 13 tokens of a whole chunk of 100 frames, and 8 of the rest.
TOKENS = np.array(
    [
        [
            *(1, 2, BEGIN, *[IMAGE] * 6, END, 3, AUDIO_BEGIN, *[CLIP] * 21, AUDIO_END),
            *(4, 5, BEGIN, *[IMAGE] * 4, END, 6, 7, 8, 9),
        ]
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    sections = {"text_config": TEXT, "audio_config": AUDIO, "vision_config": VISION}
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(
        transformers.Qwen3OmniMoeThinkerConfig(**sections, **TOKEN_IDS)
    )
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(*((0, 0.3) if weight.ndim > 1 else (0.5, 0.2)))
    path = tmp_path_factory.mktemp("omni")
    model.save_pretrained(path)
    return path


def load(folder: Path) -> tuple[ModelDef, Any]:
    source = hf_source("", str(folder), folder)
    vision = dataclasses.replace(source.model.vision, min_patches=1, max_patches=28)
    model = build(dataclasses.replace(source.model, dtypes=Dtypes(compute=Dtype.float32), vision=vision))
    return model, stream_weights(source, model, shardings=single_device_shardings(model), dtype="float32")


def media(model: ModelDef) -> tuple[jax.Array, AudioClips]:
    images = np.concatenate([patch_inputs(pixels, model.config.vision) for pixels in PIXELS])
    return jnp.asarray(images[None]), AudioClips(jnp.asarray(CLIP_FRAMES[None, None]), jnp.array([[FRAMES]]))


def expected_logits(folder: Path) -> np.ndarray:
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(TOKENS),
            attention_mask=torch.ones(TOKENS.shape, dtype=torch.long),
            pixel_values=torch.cat([torch.tensor(merged_patches(pixels, **sizes)) for pixels in PIXELS]),
            image_grid_thw=torch.tensor([[1, pixels.shape[1] // 4, pixels.shape[2] // 4] for pixels in PIXELS]),
            input_features=torch.tensor(CLIP_FRAMES.T[None]),
            feature_attention_mask=torch.ones((1, FRAMES), dtype=torch.long),
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


def our_logits(model: ModelDef, params: Any) -> np.ndarray:
    @jax.jit
    def run(params: Any, tokens: jax.Array, batch: dict[str, jax.Array]) -> jax.Array:
        ctx = Context.of_batch(batch, SINGLE, None)
        return model.logits(params, model.hidden(params, tokens, ctx)[0], SINGLE)

    images, audio = media(model)
    batch = {"positions": jnp.arange(TOKENS.shape[1])[None], "images": images}
    batch |= {"audio": audio.frames, "audio_lengths": audio.lengths}
    return np.asarray(run(params, jnp.asarray(TOKENS), batch))


def test_logits_with_images_and_audio_equal_transformers(folder: Path) -> None:
    expected = expected_logits(folder)
    np.testing.assert_allclose(our_logits(*load(folder)), expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    source = hf_source("", str(folder), folder)
    model = build(source.model)
    table = find_family(model, None)
    write_hf(tmp_path, model, FileArrays(source, model), table=table, dtype=np.dtype("float32"), extra={})
    stored, exported = (load_file(path / "model.safetensors") for path in (folder, tmp_path))
    assert table.model_type == "qwen3_omni_moe_thinker" and stored.keys() == exported.keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, stored[name])
    before, after = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    for section in ("vision_config", "audio_config"):
        assert after[section].items() <= before[section].items()
    np.testing.assert_array_equal(expected_logits(tmp_path), expected_logits(folder))


def test_each_encoder_is_an_option_and_both_are(folder: Path) -> None:
    def model(option: str) -> Any:
        return compose([f"model={option}", f"model.path={folder}", "train.seq_len=64"]).config.model

    both, images = model("from_hf_media"), model("from_hf_vision")
    assert (both.vision.num_layers, both.audio.num_layers) == (3, 1)
    assert (images.vision.num_layers, images.audio.num_layers) == (3, None)
    # The thinker without audio is a Qwen3-VL.
    assert find_family(build(images), None).model_type == "qwen3_vl_moe"


def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    """Prefill takes images and clip; decode steps continue at positions that are behind the slots of the cache."""
    model, params = load(folder)
    T = TOKENS.shape[1]
    cache, outputs, (images, audio) = model.empty_cache(DenseCacheSpec(1, T)), [], media(model)
    lag = 6 - 3 + 4 - 4

    @jax.jit
    def step(params: Any, tokens: jax.Array, ctx: Context) -> tuple[jax.Array, Any]:
        hidden, cache = model.hidden(params, tokens, ctx)
        return model.logits(params, hidden, SINGLE), cache

    for start, stop in ((0, T - 3), *((at, at + 1) for at in range(T - 3, T))):
        positions = jnp.arange(start, stop)[None]
        ctx = Context(positions=positions, segments=None, sharder=SINGLE, cache=cache, dropout_key=None)
        if start == 0:
            ctx = dataclasses.replace(ctx, images=images, audio=audio, is_fresh=True)
        else:
            ctx = dataclasses.replace(ctx, axis_positions=(positions - lag)[:, :, None])
        logits, cache = step(params, jnp.asarray(TOKENS[:, start:stop]), ctx)
        outputs.append(logits)
    np.testing.assert_allclose(np.concatenate(outputs, axis=1), our_logits(model, params), atol=1e-4)
