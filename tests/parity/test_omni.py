"""Qwen3-Omni's thinker against transformers: images of different sizes, a video and an audio clip in one prompt."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from maxhydra.config.compose.composer import compose
from maxhydra.config.schema.decode import CacheDtype, Sampling
from maxhydra.convert.hf import hf_source
from maxhydra.convert.hf_write import find_family
from maxhydra.data.image_tokens import patch_inputs
from maxhydra.data.images import ProcessedVideo, merged_patches
from maxhydra.data.video_tokens import interleaved_ids
from maxhydra.decode.image_limits import ImageLimits
from maxhydra.decode.sampling_params import make_requests
from maxhydra.layers import AudioClips
from maxhydra.layers.image_positions import ImagePlaces, VideoSteps
from maxhydra.model import ModelDef, build
from tests.support.cached_decoding import cached_logits
from tests.support.media_models import (
    AUDIO_BEGIN,
    AUDIO_END,
    BEGIN,
    CLIP,
    END,
    IMAGE,
    OMNI_AUDIO,
    VIDEO,
    export,
    forward_logits,
    load_float32,
    omni_thinker,
    randomize,
)
from tests.support.skips import import_optional

torch = import_optional("torch", extra="parity")
transformers = import_optional("transformers", extra="parity")

pytestmark = [pytest.mark.parity, pytest.mark.slow]

BANDS, FRAMES = OMNI_AUDIO["num_mel_bins"], 163
# Pixels [frames, height, width, 3] of images of 2 x 3 and 4 x 1 tokens, and of a video of three steps of 1 x 3.
GENERATOR = np.random.default_rng(0)
IMAGES = [GENERATOR.normal(size=(1, *size, 3)).astype(np.float32) for size in ((16, 24), (32, 8))]
STEPS, FPS = GENERATOR.normal(size=(6, 8, 24, 3)).astype(np.float32), 2.0
CLIP_FRAMES = GENERATOR.normal(size=(FRAMES, BANDS)).astype(np.float32)
# 13 tokens of a whole chunk of 100 frames, and 8 of the rest.
CLIP_TOKENS = [AUDIO_BEGIN, *[CLIP] * 21, AUDIO_END]
STEP, LATER = [VIDEO] * 3, [CLIP] * 13


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Two images and a video after a clip, or a video with audio; the two have the same number of frames."""

    tokens: np.ndarray
    is_heard: bool
    """Whether the audio is that of the video."""

    @classmethod
    def of(cls, *video: int, is_heard: bool) -> "Prompt":
        tokens = [1, 2, BEGIN, *[IMAGE] * 6, END, 3, *([] if is_heard else CLIP_TOKENS), 4, BEGIN, *video, END]
        return cls(np.array([[*tokens, 5, BEGIN, *[IMAGE] * 4, END, 6, 7, 8, 9]]), is_heard)


# Steps of the video are 13 positions apart; its audio ends in the middle of the second.
PROMPTS = {
    "video and clip": Prompt.of(*STEP * 3, is_heard=False),
    "audio in video": Prompt.of(AUDIO_BEGIN, *STEP, *LATER, *STEP, *LATER[:8], *STEP, AUDIO_END, is_heard=True),
}


@pytest.fixture(scope="module", params=PROMPTS)
def prompt(request: pytest.FixtureRequest) -> Prompt:
    return PROMPTS[request.param]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with weights that are large enough for every mechanism to matter."""
    torch.manual_seed(0)
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration(
        transformers.Qwen3OmniMoeThinkerConfig(**omni_thinker())
    )
    path = tmp_path_factory.mktemp("omni")
    randomize(model).save_pretrained(path)
    return path


def load(folder: Path, *, is_heard: bool = False) -> tuple[ModelDef, Any]:
    vision = hf_source("", str(folder), folder).model.vision
    videos = dataclasses.replace(vision.videos, fps=FPS, use_audio_in_video=is_heard)
    return load_float32(folder, vision=dataclasses.replace(vision, min_patches=1, max_patches=28, videos=videos))


def media(model: ModelDef) -> dict[str, Any]:
    order = (IMAGES[0], STEPS, IMAGES[1])
    images = np.concatenate([patch_inputs(pixels, model.config.vision) for pixels in order])
    audio = AudioClips(jnp.asarray(CLIP_FRAMES[None, None]), jnp.array([[FRAMES]]))
    return {"images": jnp.asarray(images[None]), "audio": audio}


def expected_logits(folder: Path, prompt: Prompt) -> np.ndarray:
    model = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    sizes = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    with torch.no_grad():
        out = model(
            input_ids=torch.tensor(prompt.tokens),
            attention_mask=torch.ones(prompt.tokens.shape, dtype=torch.long),
            pixel_values=torch.cat([torch.tensor(merged_patches(pixels, **sizes)) for pixels in IMAGES]),
            image_grid_thw=torch.tensor([[1, pixels.shape[1] // 4, pixels.shape[2] // 4] for pixels in IMAGES]),
            pixel_values_videos=torch.tensor(merged_patches(STEPS, **sizes)),
            video_grid_thw=torch.tensor([[3, 2, 6]]),
            video_second_per_grid=torch.tensor([2 / FPS]),
            input_features=torch.tensor(CLIP_FRAMES.T[None]),
            feature_attention_mask=torch.ones((1, FRAMES), dtype=torch.long),
            use_audio_in_video=prompt.is_heard,
        )
    logits: np.ndarray = out.logits.numpy()
    return logits


@pytest.mark.default_cases("audio in video")
def test_logits_with_images_a_video_and_audio_equal_transformers(folder: Path, prompt: Prompt) -> None:
    expected, (model, params) = expected_logits(folder, prompt), load(folder, is_heard=prompt.is_heard)
    np.testing.assert_allclose(forward_logits(model, params, prompt.tokens, media(model)), expected, atol=1e-4)
    assert np.abs(expected).max() > 1


def test_export_is_bit_identical(folder: Path, tmp_path: Path) -> None:
    exported = export(folder, tmp_path)
    assert exported.model_type == "qwen3_omni_moe_thinker" and not exported.missing
    for section in ("vision_config", "audio_config"):
        assert exported.after[section].items() <= exported.before[section].items()
    logits = [expected_logits(path, PROMPTS["video and clip"]) for path in (folder, tmp_path)]
    np.testing.assert_array_equal(*logits)


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


@pytest.mark.exhaustive
def test_cached_decoding_equals_one_forward_pass(folder: Path, prompt: Prompt) -> None:
    """Prefill takes all media; decode steps continue at positions that are not the slots of the cache."""
    model, params = load(folder, is_heard=prompt.is_heard)
    given, tokens = media(model), prompt.tokens
    lag = position_lag(model, tokens[0], np.asarray(given["images"][0]))
    cached = cached_logits(model, params, tokens, given, lambda positions: (positions - lag)[:, :, None])
    np.testing.assert_allclose(cached, forward_logits(model, params, tokens, given), atol=1e-4)


def position_lag(model: ModelDef, tokens: np.ndarray, images: np.ndarray) -> int:
    options = {"samples": 1, "seed": 0, "number": 0, "logprobs": None}
    (request,) = make_requests(tokens.tolist(), Sampling(), images=images, **options)
    return ImageLimits(model.config, prefill_chunk=512, cache_dtype=CacheDtype.auto).position_lag(request)


@dataclasses.dataclass
class Layout:
    """A prompt of random media: tokens, patches [t, h, w] of images and videos, and frames of clips."""

    generator: np.random.Generator
    model: Any
    tokens: list[int]
    images: list[list[int]]
    videos: list[list[int]]
    sizes: list[list[int]]
    """Rows and columns of tokens of images and steps."""
    frames: list[int]

    def add_image(self) -> None:
        rows, columns = self.generator.integers(1, 9, 2).tolist()
        self.tokens += [BEGIN, *[IMAGE] * (rows * columns), END]
        self.images.append([1, 2 * rows, 2 * columns])
        self.sizes.append([rows, columns])

    def add_clip(self) -> None:
        self.frames.append(int(self.generator.integers(1, 500)))
        self.tokens += [AUDIO_BEGIN, *[CLIP] * self.model.audio.num_tokens(self.frames[-1]), AUDIO_END]

    def add_video(self) -> None:
        """A video with audio, whose tokens the processor of transformers orders."""
        steps, rows, columns, frames = (int(self.generator.integers(1, most)) for most in (5, 20, 20, 500))
        names = {"audio_bos_token": "b", "audio_eos_token": "e", "video_token": "v", "audio_token": "a"}
        processor: Any = SimpleNamespace(video_processor=SimpleNamespace(merge_size=2), **names)
        shape = [steps, 2 * rows, 2 * columns]
        inputs = {"video_grid_thw": [shape], "video_second_per_grid": [2 / FPS]}
        audio = {"num_audio_tokens": [self.model.audio.num_tokens(frames)]}
        interleave = transformers.Qwen3OmniMoeProcessor.replace_video_with_audio_token
        text = interleave(processor, inputs, 0, audio, 0, position_id_per_seconds=13)
        ids = [BEGIN, *({"b": AUDIO_BEGIN, "e": AUDIO_END, "v": VIDEO, "a": CLIP}[letter] for letter in text), END]
        video = ProcessedVideo(np.zeros(0), (steps, 2 * rows, 2 * columns), (0.0,) * steps, steps * rows * columns)
        assert interleaved_ids(video, frames, self.model.vision, self.model.audio) == ids
        self.tokens += ids
        self.videos.append(shape)
        self.sizes += [[rows, columns]] * steps
        self.frames.append(frames)


@pytest.mark.default_cases("two seeds")
@pytest.mark.parametrize("seeds", [(2, 3), (0, 1, 4, 5, 6, 7)], ids=["two seeds", "six seeds"])
def test_tokens_and_positions_of_audio_in_videos_equal_transformers(folder: Path, seeds: tuple[int, ...]) -> None:
    """Videos that are shorter and longer than their audio, narrower and wider, with images and clips around them."""
    model, _ = load(folder, is_heard=True)
    reference = transformers.Qwen3OmniMoeThinkerForConditionalGeneration.from_pretrained(folder)
    for seed in seeds:
        made = Layout(np.random.default_rng(seed), model.config, [1, 2], [], [], [], [])
        for add in made.generator.permutation([made.add_image, made.add_clip, made.add_video] * 2):
            add()
            made.tokens += [3] * int(made.generator.integers(0, 3))
        made.tokens += [4] * 20
        tokens = np.array([made.tokens])
        expected, _ = reference.get_rope_index(
            torch.tensor(tokens),
            torch.tensor(made.images),
            torch.tensor(made.videos),
            torch.ones(tokens.shape),
            True,
            torch.tensor(made.frames),
            torch.tensor([2 / FPS] * 2),
        )
        steps = VideoSteps(jnp.asarray(tokens == VIDEO), 13, jnp.asarray(tokens == CLIP))
        is_image = jnp.asarray((tokens == VIDEO) | (tokens == IMAGE))
        places = ImagePlaces.of(is_image, jnp.asarray([made.sizes]), steps)
        positions = places.axis_positions(jnp.arange(tokens.shape[1])[None])
        np.testing.assert_array_equal(positions[0].T, expected[:, 0])
        images = 2.0 * np.array(made.sizes)[:, None]
        assert position_lag(model, tokens[0], images) == tokens.shape[1] - 1 - expected[0, 0, -1]
