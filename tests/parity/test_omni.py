"""Qwen3-Omni's thinker against transformers: images of different sizes, a video and an audio clip in one prompt."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family
from maxhydra.data.image_tokens import patch_inputs
from maxhydra.data.images import merged_patches
from maxhydra.layers import AudioClips
from maxhydra.model import ModelDef, build
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import export, forward_logits, load_float32
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

VIDEO, AUDIO_BEGIN, AUDIO_END, CLIP, BEGIN, END, IMAGE, BANDS, FRAMES = 56, 57, 58, 59, 60, 61, 62, 20, 163
TOKEN_IDS = {
    "audio_token_id": CLIP,
    "audio_start_token_id": AUDIO_BEGIN,
    "audio_end_token_id": AUDIO_END,
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": BEGIN,
    "vision_end_token_id": END,
    "position_id_per_seconds": 13,
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
# Pixels [frames, height, width, 3] of images of 2 x 3 and 4 x 1 tokens, and of a video of three steps of 1 x 3.
GENERATOR = np.random.default_rng(0)
IMAGES = [GENERATOR.normal(size=(1, *size, 3)).astype(np.float32) for size in ((16, 24), (32, 8))]
STEPS, FPS = GENERATOR.normal(size=(6, 8, 24, 3)).astype(np.float32), 2.0
CLIP_FRAMES = GENERATOR.normal(size=(FRAMES, BANDS)).astype(np.float32)
# 13 tokens of a whole chunk of 100 frames, and 8 of the rest.
TOKENS = np.array(
    [
        [
            *(1, 2, BEGIN, *[IMAGE] * 6, END, 3, AUDIO_BEGIN, *[CLIP] * 21, AUDIO_END),
            *(4, BEGIN, *[VIDEO] * 9, END, 5, BEGIN, *[IMAGE] * 4, END, 6, 7, 8, 9),
        ]
    ]
)
# Tokens less positions: images take their longer side, the video twice the 13 positions of a step, and one.
LAG = 6 - 3 + 4 - 4 + 9 - (2 * 13 + 1)


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
    vision = hf_source("", str(folder), folder).model.vision
    videos = dataclasses.replace(vision.videos, fps=FPS)
    return load_float32(folder, vision=dataclasses.replace(vision, min_patches=1, max_patches=28, videos=videos))


def media(model: ModelDef) -> dict[str, Any]:
    order = (IMAGES[0], STEPS, IMAGES[1])
    images = np.concatenate([patch_inputs(pixels, model.config.vision) for pixels in order])
    audio = AudioClips(jnp.asarray(CLIP_FRAMES[None, None]), jnp.array([[FRAMES]]))
    return {"images": jnp.asarray(images[None]), "audio": audio}


def expected_logits(folder: Path) -> np.ndarray:
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(TOKENS),
            attention_mask=torch.ones(TOKENS.shape, dtype=torch.long),
            pixel_values=torch.cat([torch.tensor(merged_patches(pixels, **sizes)) for pixels in IMAGES]),
            image_grid_thw=torch.tensor([[1, pixels.shape[1] // 4, pixels.shape[2] // 4] for pixels in IMAGES]),
            pixel_values_videos=torch.tensor(merged_patches(STEPS, **sizes)),
            video_grid_thw=torch.tensor([[3, 2, 6]]),
            video_second_per_grid=torch.tensor([2 / FPS]),
            input_features=torch.tensor(CLIP_FRAMES.T[None]),
            feature_attention_mask=torch.ones((1, FRAMES), dtype=torch.long),
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


def test_logits_with_images_a_video_and_audio_equal_transformers(folder: Path) -> None:
    expected, (model, params) = expected_logits(folder), load(folder)
    np.testing.assert_allclose(forward_logits(model, params, TOKENS, media(model)), expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path)
    assert exported.model_type == "qwen3_omni_moe_thinker" and not exported.missing
    for section in ("vision_config", "audio_config"):
        assert exported.after[section].items() <= exported.before[section].items()
    np.testing.assert_array_equal(expected_logits(tmp_path), expected_logits(folder))


def test_each_encoder_is_an_option_and_both_are(folder: Path) -> None:
    def model(option: str) -> Any:
        return compose([f"model={option}", f"model.path={folder}", "train.seq_len=64"]).config.model

    both, images = model("from_hf_media"), model("from_hf_vision")
    assert (both.vision.num_layers, both.audio.num_layers) == (3, 1)
    assert (images.vision.num_layers, images.audio.num_layers) == (3, None)
    # The thinker without audio is a Qwen3-VL, but for the positions of videos.
    still = dataclasses.replace(images, vision=dataclasses.replace(images.vision, video_id=None))
    assert find_family(build(still), None).model_type == "qwen3_vl_moe"
    assert find_family(build(images), None).model_type == "qwen3_omni_moe_thinker"


def test_cached_decoding_equals_one_forward_pass(folder: Path) -> None:
    """Prefill takes all media; decode steps continue at positions that are not the slots of the cache."""
    model, params = load(folder)
    cached = cached_logits(model, params, TOKENS, media(model), lambda positions: (positions - LAG)[:, :, None])
    np.testing.assert_allclose(cached, forward_logits(model, params, TOKENS, media(model)), atol=1e-4)
